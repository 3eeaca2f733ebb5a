// What an expert's gate becomes before it is multiplied: f(g) = g sigma(y(g)).
#pragma once

#include <cstdint>

namespace moesaic {

enum class Gate : std::int8_t {
  kSilu,      ///< y = g
  kGeluTanh,  ///< y = 2 sqrt(2 / pi) (g + 0.044715 g^3): GELU by tanh, for (1 + tanh(y / 2)) / 2 = sigma(y)
};

}  // namespace moesaic
