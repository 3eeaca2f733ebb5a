// What the tests of the layer expect: results close to the reference's.
#pragma once

#include "tests/moe/problem.h"

namespace moesaic::moe {

ExpertsLayer MakeLayer(const Problem& problem, threadpool::Pool& pool);

void ExpectClose(const TensorView& tensor, const Matrix& reference, const char* name);
void ExpectClose(const Gradients& gradients, const ReferenceGradients& reference);

/// Makes the layer, runs forward with and without saving and backward, and compares everything with the reference.
void ExpectMatchesReference(const ProblemSpec& spec, threadpool::Pool& pool);

}  // namespace moesaic::moe
