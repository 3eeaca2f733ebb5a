// Row::Retain, for the files that make up Row.
#pragma once

#include "sampling/row.h"

namespace moesaic::sampling {

/// Leaves those elements i of the list for which keep(i) is true, in order. Asks once for each i, ascending, before anything at
/// i or beyond has moved. Every element is copied: whether it stays could not be predicted.
template <typename Keep>
void Row::Retain(Keep keep) {
  std::int64_t left = 0;
  for (std::int64_t i = 0; i < count_; ++i) {
    const bool keeps = keep(i);
    scratch_->values[left] = scratch_->values[i];
    scratch_->columns[left] = scratch_->columns[i];
    scratch_->weights[left] = scratch_->weights[i];
    left += keeps ? 1 : 0;
  }
  count_ = left;
}

}  // namespace moesaic::sampling
