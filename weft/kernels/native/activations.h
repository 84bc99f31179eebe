// The functions of feed-forward layers, and how steep they are.
#pragma once

#include "products.h"

namespace weft {

enum Activation { RELU, GELU, GELU_TANH, SWIGLU };

inline Floats smaller(Floats a, Floats b) { return -larger(-a, -b); }

// 1 + e^(−x)
inline Floats one_and_exp(Floats x) { return 1.0f + exp(smaller(-x, all(88.0f))); }

// The density of a normal distribution at x.
inline Floats density(Floats x) { return 0.39894228f * exp(-0.5f * x * x); }

// How much of it lies below x, to 7.5e-8 (Abramowitz and Stegun 26.2.17).
inline Floats below(Floats x, Floats density) {
  const Floats t = 1.0f / (1.0f + 0.2316419f * (x < 0 ? -x : x));
  Floats y = all(1.330274429f);
  for (float c : {-1.821255978f, 1.781477937f, -0.356563782f, 0.319381530f}) y = y * t + c;
  y = y * t * density;
  return x < 0 ? y : 1.0f - y;
}

inline Floats activated(Floats x, int activation) {
  switch (activation) {
    case GELU:
      return x * below(x, density(x));
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
    case GELU: {
      const Floats here = density(x);
      return below(x, here) + x * here;
    }
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
