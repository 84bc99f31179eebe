// What an update does to parameters, in passes over all of them: the norm of their gradients, and AdamW.
#pragma once

#include <vector>

#include "products.h"

namespace weft {

// A parameter: its numbers, their gradients and AdamW's means of these and of their squares.
struct Parameter {
  float *at, *grad, *mean, *square;
  int64_t count;
  float decay;
};

struct AdamW {
  float by;  // gradients are so many times what stands there
  float rate, beta1, beta2, eps;
  double rest1, rest2;  // 1 − β₁ᵗ, 1 − β₂ᵗ
};

namespace updates {

constexpr int64_t PIECE = 4096;  // numbers that are taken together

// Pieces of parameters, counted through all of them: numbers begin … end of one.
struct Piece {
  const Parameter* of;
  int64_t begin, end;
};

inline std::vector<Piece> pieces(const Parameter* parameters, int32_t count) {
  std::vector<Piece> all;
  for (int32_t i = 0; i < count; i++)
    for (int64_t begin = 0; begin < parameters[i].count; begin += PIECE)
      all.push_back({parameters + i, begin, std::min(begin + PIECE, parameters[i].count)});
  return all;
}

// The sum of the gradients' squares.
inline double squares(const Piece& piece) {
  const float* grad = piece.of->grad + piece.begin;
  Floats sums[2] = {};
  double rest = 0.0;
  const int64_t n = piece.end - piece.begin, whole = n / (2 * LANES) * (2 * LANES);
  for (int64_t i = 0; i < whole; i += 2 * LANES)
    for (int half = 0; half < 2; half++) {
      const Floats g = load(grad + i + half * LANES);
      sums[half] += g * g;
    }
  for (int64_t i = whole; i < n; i++) rest += double(grad[i]) * grad[i];
  return rest + sum(sums[0] + sums[1]);
}

inline void update(const Piece& piece, const AdamW& a) {
  const Parameter& p = *piece.of;
  const float stays = 1.0f - a.rate * p.decay, step = float(a.rate / a.rest1), wide = float(1.0 / std::sqrt(a.rest2));
  const float *grad = p.grad + piece.begin;
  float *at = p.at + piece.begin, *mean = p.mean + piece.begin, *square = p.square + piece.begin;
  each(piece.end - piece.begin, [&](auto i) {
    const auto g = i.get(grad) * a.by;
    const auto m = i.get(mean) + (1.0f - a.beta1) * (g - i.get(mean));
    const auto v = a.beta2 * i.get(square) + (1.0f - a.beta2) * g * g;
    i.put(mean, m), i.put(square, v);
    i.put(at, i.get(at) * stays - step * m / (root(v) * wide + a.eps));
  });
}

}  // namespace updates
}  // namespace weft
