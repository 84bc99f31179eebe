// Factors of products with a layer: how they are packed for the way that E multiplies, and what gradients of layers are
// made of.
#pragma once

#include "attention.h"
#include "memory.h"
#include "tiles.h"

namespace weft {
namespace packing {

using attention::deep;
using attention::product;
using attention::TILED;
using attention::whole;

constexpr int64_t PANEL = 4 * LANES;  // columns that are multiplied together
constexpr int64_t GRAIN = 32;         // what a depth is divided by between threads
constexpr int64_t NEAR = 1024;        // so deep a part of a panel stays near while rows are multiplied by it

// Numbers that follow each other, from here on, as they are multiplied over them: pairs of bf16 in the place of a float.
template <class E>
inline Floats along(const float* at, int64_t count) {
  if constexpr (E::DEEP == 1) {
    return load(at);
  } else {
    bf16 few[2 * LANES];
    store(few, load(at));
    store(few + LANES, count > LANES ? load(at + LANES) : Floats{});
    return load(reinterpret_cast<const float*>(few));
  }
}

inline Floats rounded(const float* at) {
  bf16 few[LANES];
  store(few, load(at));
  return load(few);
}

// A panel of a matrix [depth, w] for products over its depth: [depth / DEEP, w]; row(k): where its row k stands.
template <class E, class F>
inline void weave(int64_t depth, int64_t w, F row, float* to) {
  constexpr bool NARROW = std::is_same_v<decltype(row(0)), const bf16*>;
  for (int64_t k = 0; k < depth; k += E::DEEP, to += w)
    if constexpr (E::DEEP == 2 && NARROW) {
      attention::pairs(row(k), k + 1 < depth ? row(k + 1) : nullptr, w, to);
    } else {
      for (int64_t i = 0; i < w; i += LANES)
        if constexpr (E::DEEP == 1) {
          store(to + i, load(row(k) + i));
        } else {
          const Floats low = rounded(row(k) + i), high = k + 1 < depth ? rounded(row(k + 1) + i) : Floats{};
          store(to + i, (Floats)((Words)low >> 16 | (Words)high));
        }
    }
}

// The same of a matrix whose columns are given: column(n), of fp32.
template <class E, class F>
inline void weave_turned(int64_t depth, int64_t w, F column, float* to) {
  const int64_t most = deep<E>(depth);
  for (int64_t n = 0; n < w; n += LANES)
    for (int64_t k = 0; k < most; k += LANES) {
      Floats square[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) square[i] = along<E>(column(n + i) + k * E::DEEP, depth - k * E::DEEP);
      turn(square);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++)
        if (k + i < most) store(to + (k + i) * w + n, square[i]);
    }
}

// f(first column, columns) of each panel.
template <class F>
inline void panels(int64_t width, F f) {
  for (int64_t n = 0; n < width; n += PANEL) f(n, std::min(PANEL, width - n));
}

// How layers are packed for the way that E multiplies, and multiplied by.
template <class E>
struct Packing {
  // Floats of a factor; and, for so many rows and the deepest factor, of room to work in.
  static int64_t size(int64_t depth, int64_t width) { return aligned(deep<E>(depth) * whole(width) + LANES); }
  static int64_t room(int64_t, int64_t) { return 0; }

  // Columns n to n + w of a factor [depth, …]: column(i) of it stands in a row; all of a vector must be there.
  template <class F>
  static void pack_turned(int64_t depth, int64_t n, int64_t w, F column, float* to) {
    weave_turned<E>(depth, whole(w), column, to + n * deep<E>(depth));
  }
  // The same of a factor that stands as it is: row(k) from column n on, for k from `begin` to `end`, in whole grains.
  template <class F>
  static void pack(int64_t depth, int64_t n, int64_t w, int64_t begin, int64_t end, F row, float* to) {
    weave<E>(end - begin, w, [&](int64_t k) { return row(begin + k); }, to + n * deep<E>(depth) + begin / E::DEEP * w);
  }

  // Rows of x times a packed factor: f(a column)(a row, the vector that begins there).
  template <class T, class F>
  static void times(int64_t rows, const T* x, int64_t x_row, int64_t depth, const float* factor, int64_t width, float*,
                    F f) {
    panels(width, [&](int64_t n, int64_t w) {
      const auto from = [&](int64_t i) { return f(n + i); };
      attention::multiplied<E>(rows, deep<E>(depth), whole(w), view(x, x_row), factor + n * deep<E>(depth), whole(w),
                               attention::To<decltype(from)>{from});
    });
  }

  // to [rows, width] = the same, of a factor that may be deeper than what stays near.
  template <class T>
  static void into(int64_t rows, const T* x, int64_t x_row, int64_t depth, const float* factor, int64_t width,
                   float* to, float*) {
    for (int64_t k = 0; k < depth; k += NEAR)
      panels(width, [&](int64_t n, int64_t w) {
        product<E>(rows, deep<E>(std::min(NEAR, depth - k)), w, view(x + k, x_row),
                   factor + n * deep<E>(depth) + k / E::DEEP * w, w, to + n, width, 1.0f, k > 0);
      });
  }

  template <class T>
  static attention::View view(const T* x, int64_t x_row) {
    return {reinterpret_cast<const float*>(x), x_row / E::DEEP, 1};
  }
};

// What the gradient of a layer is made of, packed: its output's gradients [rows, out] and its inputs [rows, in], of some
// tiles of rows. A tile begins at a step of its own.
template <class E>
struct Kept {
  float *left, *right;
  int64_t out, in, steps;  // of all these tiles

  static int64_t steps_of(int64_t rows) { return deep<E>(rows); }
  static int64_t size(int64_t side, int64_t steps) { return aligned(steps * whole(side)); }

  // Rows from this step on, `grad_row` and `x_row` numbers apart.
  template <class T>
  void keep(int64_t step, int64_t rows, const T* grad, int64_t grad_row, const T* x, int64_t x_row) const {
    const auto woven = [&](const T* from, int64_t row, int64_t width, float* to) {
      panels(whole(width), [&](int64_t n, int64_t w) {
        weave<E>(rows, w, [&](int64_t k) { return from + k * row + n; }, to + n * steps + step * w);
      });
    };
    woven(grad, grad_row, out, left), woven(x, x_row, in, right);
  }

  // A worker's share of the product of so many steps: into `to` [out, in], or onto what is there.
  void multiply(int64_t depth, float* to, bool more, int worker, int workers) const {
    const bool by_rows = out >= in;  // the wider side is shared out
    const int64_t side = by_rows ? out : in, parts = (side + PANEL - 1) / PANEL;
    const int64_t begin = parts * worker / workers * PANEL, end = std::min(parts * (worker + 1) / workers * PANEL, side);
    const auto from_to = [&](bool shared, int64_t width, auto f) {
      for (int64_t n = shared ? begin : 0; n < (shared ? end : width); n += PANEL) f(n, std::min(PANEL, width - n));
    };
    from_to(by_rows, out, [&](int64_t m, int64_t high) {
      from_to(!by_rows, in, [&](int64_t n, int64_t w) {
        product<E>(high, depth, w, {left + m * steps, 1, whole(high)}, right + n * steps, w, to + m * in + n, in, 1.0f,
                   more);
      });
    });
  }
};

#if defined(WEFT_TILES)
using attention::Tiled;

template <>
struct Packing<Tiled> {
  static int64_t size(int64_t depth, int64_t width) { return tiles::packed(width, depth) / 2; }
  static int64_t room(int64_t rows, int64_t deepest) { return size(deepest, rows); }

  template <class F>
  static void pack_turned(int64_t depth, int64_t n, int64_t w, F column, float* to) {
    const int64_t apart = tiles::steps(depth) * tiles::BLOCK;
    tiles::pack_rows(w, depth, column, true, reinterpret_cast<bf16*>(to) + n / tiles::SIDE * apart, apart);
  }
  template <class F>
  static void pack(int64_t depth, int64_t n, int64_t w, int64_t begin, int64_t end, F row, float* to) {
    static_assert(GRAIN % tiles::DEPTH == 0, "a part begins with a block");
    const int64_t apart = tiles::steps(depth) * tiles::BLOCK;
    tiles::pack_columns(w, end - begin, [&](int64_t k) { return row(begin + k); }, false,
                        reinterpret_cast<bf16*>(to) + n / tiles::SIDE * apart + begin * tiles::SIDE, apart);
  }

  template <class F>
  static void times(int64_t rows, const bf16* x, int64_t x_row, int64_t depth, const float* factor, int64_t width,
                    float* some, F f) {
    using namespace tiles;
    const Factor right = in_blocks(reinterpret_cast<const bf16*>(factor), steps(depth) * BLOCK);
    const Factor left = left_factor(rows, x, x_row, depth, reinterpret_cast<bf16*>(some));
    Unit::written();
    for (int64_t begin = 0; begin < width; begin += NEAR)
      for (int64_t m = 0; m < rows; m += PAIR) {
        const int64_t high = std::min(PAIR, rows - m);
        tiles::multiply(high, left.from(m), right.from(begin), steps(depth), std::min(NEAR, width - begin),
                        [&](int64_t n, int64_t w, const float* z) {
                          for (int64_t i = 0; i < w; i += LANES) {
                            const auto put = f(begin + n + i);
                            for (int64_t r = 0; r < high; r++) put(m + r, load(z + r * PAIR + i));
                          }
                        });
      }
  }

  static void into(int64_t rows, const bf16* x, int64_t x_row, int64_t depth, const float* factor, int64_t width,
                   float* to, float* some) {
    using namespace tiles;
    const Factor right = in_blocks(reinterpret_cast<const bf16*>(factor), steps(depth) * BLOCK);
    const Factor left = left_factor(rows, x, x_row, depth, reinterpret_cast<bf16*>(some));
    for (int64_t k = 0; k < steps(depth); k += NEAR / DEPTH)
      multiply_into(rows, left.deep(k), right.deep(k), std::min(NEAR / DEPTH, steps(depth) - k), width, to, width, k > 0);
  }
};

template <>
struct Kept<Tiled> {
  float *left, *right;
  int64_t out, in, steps;

  static int64_t steps_of(int64_t rows) { return tiles::steps(rows); }
  static int64_t size(int64_t side, int64_t steps) { return tiles::packed(side, steps * tiles::DEPTH) / 2; }

  void keep(int64_t step, int64_t rows, const bf16* grad, int64_t grad_row, const bf16* x, int64_t x_row) const {
    using namespace tiles;
    const auto packed = [&](const bf16* from, int64_t row, int64_t width, bool turned, float* to) {
      pack_columns(width, rows, [&](int64_t k) { return from + k * row; }, turned,
                   reinterpret_cast<bf16*>(to) + step * BLOCK, steps * BLOCK);
    };
    packed(grad, grad_row, out, true, left), packed(x, x_row, in, false, right);
  }

  void multiply(int64_t depth, float* to, bool more, int worker, int workers) const {
    using namespace tiles;
    const Factor a = in_blocks(reinterpret_cast<const bf16*>(left), steps * BLOCK);
    const Factor b = in_blocks(reinterpret_cast<const bf16*>(right), steps * BLOCK);
    const bool by_rows = out >= in;  // the wider side is read once, the other from a nearer cache
    const int64_t parts = blocks(by_rows ? out : in, PAIR);
    Unit::written();
    for (int64_t part = parts * worker / workers; part < parts * (worker + 1) / workers; part++) {
      const int64_t at = part * PAIR;
      if (by_rows)
        multiply_into(std::min(PAIR, out - at), a.from(at), b, depth, in, to + at * in, in, more);
      else
        multiply_into(out, a, b.from(at), depth, std::min(PAIR, in - at), to + at, in, more);
    }
  }
};
#endif

}  // namespace packing
}  // namespace weft
