// The functions of feed-forward layers, and how steep they are.
#pragma once

#include "products.h"

namespace weft {

enum Activation { RELU, GELU, GELU_TANH, SWIGLU };

// erf to 1.5e-7 (Abramowitz and Stegun 7.1.26).
inline Floats erf(Floats x) {
  const Floats size = x < 0 ? -x : x, t = 1.0f / (1.0f + 0.3275911f * size);
  Floats y = all(1.061405429f);
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) y = y * t + c;
  y = 1.0f - y * t * exp(-size * size);
  return x < 0 ? -y : y;
}

inline Floats smaller(Floats a, Floats b) { return -larger(-a, -b); }

// 1 + e^(−x)
inline Floats one_and_exp(Floats x) { return 1.0f + exp(smaller(-x, all(88.0f))); }

inline Floats activated(Floats x, int activation) {
  switch (activation) {
    case GELU:
      return 0.5f * x * (1.0f + erf(x * 0.70710678f));
    case GELU_TANH:  // (1 + tanh z) / 2 = 1 / (1 + e^(−2z))
      return x / one_and_exp(1.59576912f * (x + 0.044715f * x * x * x));
    case SWIGLU:
      return x / one_and_exp(x);
    default:
      return x;  // RELU is done where the product is put
  }
}

// The derivative of it, of RELU too.
inline Floats slope(Floats x, int activation) {
  switch (activation) {
    case GELU:
      return 0.5f * (1.0f + erf(x * 0.70710678f)) + x * 0.39894228f * exp(-0.5f * x * x);
    case GELU_TANH: {
      const Floats open = 1.0f / one_and_exp(1.59576912f * (x + 0.044715f * x * x * x));
      return open + x * open * (1.0f - open) * 1.59576912f * (1.0f + 0.134145f * x * x);
    }
    case SWIGLU: {
      const Floats open = 1.0f / one_and_exp(x);
      return open + x * open * (1.0f - open);
    }
    default:
      return x > 0 ? all(1.0f) : Floats{};
  }
}

}  // namespace weft
