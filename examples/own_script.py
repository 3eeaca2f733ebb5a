"""LoRA fine-tuning of an MoE model on a CPU through moesaic, the whole script: ``own_script.py MODEL TEXT OUT``."""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

import moesaic.hf

if len(sys.argv) != 4:
    sys.exit(__doc__)
name, text, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
print(moesaic.hf.prepare(model))  # the one line that moesaic needs

lora = LoraConfig(
    r=16,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    target_parameters=["experts.gate_up_proj", "experts.down_proj"],
)
data = load_dataset("text", data_files=text, split="train")
trainer = SFTTrainer(model, SFTConfig(out, use_cpu=True, max_steps=100), train_dataset=data, peft_config=lora)
print(moesaic.hf.fuse(trainer.model))  # attention, dense layers with their adapters, and the loss, too
trainer.train()
trainer.save_model()  # a PEFT folder, which fits the stock model as well
