// A whole sub-layer of training in one call, and its gradients: x + dropout(f(norm(x))), where f is a feed-forward or
// self-attention. Some sequences at a time go through all of it while they are near; the rest of the memory sees what
// must be kept for the way back, and that once.
//
// What is read and written is float or bf16, and so are the factors of products; all sums are in float. Every width is
// in whole vectors.
#pragma once

#include <atomic>
#include <new>

#include "attention.h"
#include "rows.h"
#include "threads.h"

namespace weft {

// Up to three linear layers of one input, whose outputs stand side by side.
struct Joined {
  const float* weight[3];  // [outs, in]
  const float* bias[3];    // may be null, all or none
  int64_t outs[3];
  int64_t in;
  int64_t out() const { return outs[0] + outs[1] + outs[2]; }
  // Row n of the matrices, one below the other.
  const float* row(int64_t n) const {
    int i = 0;
    for (; n >= outs[i]; i++) n -= outs[i];
    return weight[i] + n * in;
  }
  const float* bias_at(int64_t n) const {
    int i = 0;
    for (; n >= outs[i]; i++) n -= outs[i];
    return bias[i] == nullptr ? nullptr : bias[i] + n;
  }
};

// The gradients' memory, [gradients]: of the first layers [out, in] and their biases, of the last and its bias, of the
// norm's gains and bias; each is there whether there is such a bias or not.
struct Sublayer {
  Norming norm;        // of x [rows, n]
  Joined first, last;
  Attention attention; // its places; rows 0: it is a feed-forward
  Drop drop;           // of what is added; kept 0: nothing is dropped
  const float *cos, *sin;  // [length, head / 2] by which queries and keys are turned, or null
  int64_t length;      // of a sequence
  int32_t activation, pairs;  // pairs: neighbours are turned together, and not halves
  void* between;       // [rows, first.out]: what the first layers gave, queries and keys turned
  void* inside;        // [rows, last.in]: what the last layer took
  void* y;             // [rows, n]
  const void* grad;    // of y
  void* dx;
  float* gradients;
};

namespace sublayers {

using attention::deep;
using attention::Multiplied;

constexpr int64_t PANEL = 4 * LANES;  // columns that are multiplied together
constexpr int64_t TILE = 128;         // rows that go through a sub-layer together, or a sequence, if that is longer

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

inline Floats rounded(const bf16* at) { return load(at); }
inline Floats rounded(const float* at) {
  bf16 few[LANES];
  store(few, load(at));
  return load(few);
}

// A panel of a matrix [depth, w] for products over its depth: [depth / DEEP, w]; row(k): where its row k stands.
template <class E, class F>
inline void weave(int64_t depth, int64_t w, F row, float* to) {
  for (int64_t k = 0; k < depth; k += E::DEEP, to += w)
    for (int64_t i = 0; i < w; i += LANES)
      if constexpr (E::DEEP == 1) {
        store(to + i, load(row(k) + i));
      } else {
        const Floats low = rounded(row(k) + i), high = k + 1 < depth ? rounded(row(k + 1) + i) : Floats{};
        store(to + i, (Floats)((Words)low >> 16 | (Words)high));
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
      attention::turn(square);
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

// Rows of x times a matrix [depth, width] in panels: f(first column, columns, result [rows, PANEL]) panel by panel.
template <class T, class F>
inline void times(int64_t rows, const T* x, int64_t depth, const float* matrix, int64_t width, float* some, F f) {
  using E = Multiplied<T>;
  panels(width, [&](int64_t n, int64_t w) {
    attention::product<E>(rows, deep<E>(depth), w, {reinterpret_cast<const float*>(x), depth / E::DEEP, 1},
                          matrix + n * deep<E>(depth), w, some, PANEL);
    f(n, w, some);
  });
}

// to [out, in] += gradᵀ x over rows; bias [out] += grad, summed over them.
template <class T>
inline void add_gradients(int64_t rows, const T* grad, int64_t out, const T* x, int64_t in, float* to, float* bias,
                          float* woven, float* panel) {
  using E = Multiplied<T>;
  const float* left = attention::woven<E>(reinterpret_cast<const float*>(grad), rows, out, woven);
  panels(in, [&](int64_t n, int64_t w) {
    weave<E>(rows, w, [&](int64_t k) { return x + k * in + n; }, panel);
    attention::product<E>(out, deep<E>(rows), w, {left, 1, out}, panel, w, to + n, in, 1.0f, true);
  });
  panels(out, [&](int64_t n, int64_t w) {
    for (int64_t i = 0; i < w; i += LANES) {
      Floats sums = load(bias + n + i);
      for (int64_t r = 0; r < rows; r++) sums += load(grad + r * out + n + i);
      store(bias + n + i, sums);
    }
  });
}

// Everything that one call works on.
template <class T>
struct Work {
  using E = Multiplied<T>;
  const Sublayer& s;
  const bool back, gated;
  const int64_t dim, wide, inner, sequences, together, tiles, size;
  float *first, *last;  // the layers in panels, as this pass multiplies by them

  Work(const Sublayer& s, bool back)
      : s(s), back(back), gated(!s.attention.rows && s.activation == SWIGLU), dim(s.norm.n), wide(s.first.out()),
        inner(s.last.in), sequences(s.norm.rows / s.length), together(std::max<int64_t>(1, TILE / s.length)),
        tiles((sequences + together - 1) / together), size(gradients()) {}

  int64_t gradients() const { return wide * dim + wide + dim * inner + dim + 2 * dim; }
  int64_t packed() const { return (wide + inner) * dim / E::DEEP + 2 * LANES; }
  int64_t most() const { return together * s.length; }  // rows of a tile

  // Floats that a thread needs.
  int64_t room() const {
    const int64_t vectors = 2 * dim + inner + wide;  // of T
    return 2 * dim + most() * (PANEL + std::max(wide, dim)) + PANEL * (most() + 1) + most() * vectors;
  }

  // Panels from number `begin` on, each step-th.
  void pack(int begin, int step) {
    int turn = 0;
    const auto each_panel = [&](int64_t width, auto f) {
      panels(width, [&](int64_t n, int64_t w) {
        if (turn++ % step == begin) f(n, w);
      });
    };
    if (back) {
      each_panel(dim, [&](int64_t n, int64_t w) {
        weave<E>(wide, w, [&](int64_t k) { return s.first.row(k) + n; }, first + n * deep<E>(wide));
      });
      each_panel(inner, [&](int64_t n, int64_t w) {
        weave<E>(dim, w, [&](int64_t k) { return s.last.row(k) + n; }, last + n * deep<E>(dim));
      });
    } else {
      each_panel(wide, [&](int64_t n, int64_t w) {
        weave_turned<E>(dim, w, [&](int64_t i) { return s.first.row(n + i); }, first + n * deep<E>(dim));
      });
      each_panel(dim, [&](int64_t n, int64_t w) {
        weave_turned<E>(inner, w, [&](int64_t i) { return s.last.row(n + i); }, last + n * deep<E>(inner));
      });
    }
  }

  // What stands between the layers [count, inner], from what the first gave; and on the way back, its gradient.
  template <class F>
  void activations(int64_t count, F f) const {
    if (!gated) return f(int64_t{0}, int64_t{0}, count * inner);
    for (int64_t r = 0; r < count; r++) f(r * wide, r * inner, inner);
  }

  // Queries and keys of sequences, turned by their angles, or back.
  void turn(T* x, int64_t rows, float way) const {
    if (s.cos == nullptr) return;
    const int64_t half = s.attention.dim / 2, heads = s.attention.heads + s.attention.groups;
    for (int64_t r = 0; r < rows; r++) {
      const float *cos = s.cos + r % s.length * half, *sin = s.sin + r % s.length * half;
      for (int64_t h = 0; h < heads; h++) {
        T* head = x + r * wide + h * 2 * half;
        if (s.pairs) {
          for (int64_t i = 0; i < half; i++) {
            const float a = One{2 * i}.get(head), b = One{2 * i + 1}.get(head), side = way * sin[i];
            One{2 * i}.put(head, a * cos[i] - b * side), One{2 * i + 1}.put(head, b * cos[i] + a * side);
          }
          continue;
        }
        rows::vectors(half, [&](auto at) {
          const Floats a = at.get(head), b = at.get(head + half), c = at.get(cos), side = way * at.get(sin);
          at.put(head, a * c - b * side), at.put(head + half, b * c + a * side);
        });
      }
    }
  }

  // Attention of sequences from `begin` to `end`, whose queries, keys and values are at `x`, what comes of them (or
  // its gradient) at `out`, and the gradients of the former at `dx`: of the first of these sequences.
  void attend(int64_t begin, int64_t end, T* x, T* out, T* dx) const {
    Attention a = s.attention;
    const int64_t keys = a.heads * a.dim, values = keys + a.groups * a.dim;
    const auto places = [&](T* at, int64_t width) {
      return Heads{at - begin * s.length * width, s.length * width, a.dim, width};
    };
    a.q = places(x, wide), a.k = places(x + keys, wide), a.v = places(x + values, wide), a.out = places(out, inner);
    a.dq = places(dx, wide), a.dk = places(dx + keys, wide), a.dv = places(dx + values, wide);
    weft::attend<T>(a, begin * a.groups, end * a.groups, back);
  }

  void forward(int64_t tile, float* memory) const {
    const int64_t begin = tile * together, end = std::min(begin + together, sequences);
    const int64_t from = begin * s.length, count = (end - begin) * s.length;
    const T* x = static_cast<const T*>(s.norm.x) + from * dim;
    T *between = static_cast<T*>(s.between) + from * wide, *y = static_cast<T*>(s.y) + from * dim;
    float* some = memory;
    T* normed = reinterpret_cast<T*>(some + PANEL * count);
    T* inside = static_cast<T*>(s.inside) + from * inner;
    normalise(s.norm, from, from + count, normed - from * dim);
    times(count, normed, dim, first, wide, some, [&](int64_t n, int64_t w, const float* z) {
      put(count, n, w, z, &s.first, between, wide);
    });
    if (s.attention.rows) {
      turn(between, count, 1.0f);
      attend(begin, end, between, inside, between);
    } else {
      with_activation(s.activation, [&](auto f) {
        activations(count, [&](int64_t in, int64_t out, int64_t n) {
          const T* given = between + in;
          activate<decltype(f)::value>(gated ? given + inner : given, gated ? given : nullptr, inside + out, n);
        });
      });
    }
    times(count, inside, inner, last, dim, some, [&](int64_t n, int64_t w, const float* z) {
      put(count, n, w, z, &s.last, y, dim, s.drop.kept == 0.0f ? x : nullptr);
    });
    if (s.drop.kept != 0.0f) {
      T* whole = static_cast<T*>(s.y);
      weft::drop(s.drop, whole, static_cast<const T*>(s.norm.x), whole, from * dim, (from + count) * dim);
    }
  }

  // Columns of y [count, width]: what a product gave, the bias of these layers, and more, if there are any.
  void put(int64_t count, int64_t n, int64_t w, const float* z, const Joined* layers, T* y, int64_t width,
           const T* onto = nullptr) const {
    for (int64_t i = 0; i < w; i += LANES) {  // a vector's width of it is of one layer
      const float* bias = layers == nullptr ? nullptr : layers->bias_at(n + i);
      const Floats more = bias == nullptr ? Floats{} : load(bias);
      for (int64_t r = 0; r < count; r++) {
        const Floats sum = load(z + r * PANEL + i) + more;
        store(y + r * width + n + i, onto == nullptr ? sum : sum + load(onto + r * width + n + i));
      }
    }
  }

  // Adds the gradients of the parameters to `to`.
  void backward(int64_t tile, float* memory, float* to) const {
    const int64_t begin = tile * together, end = std::min(begin + together, sequences);
    const int64_t from = begin * s.length, count = (end - begin) * s.length;
    T* between = static_cast<T*>(s.between) + from * wide;
    const T *grad = static_cast<const T*>(s.grad) + from * dim, *inside = static_cast<T*>(s.inside) + from * inner;
    float *norms = memory, *some = norms + 2 * dim, *woven = some + PANEL * count;
    float* panel = woven + count * std::max(wide, dim);
    T* normed = reinterpret_cast<T*>(panel + PANEL * (count + 1));
    T *added = normed + count * dim, *dinside = added + count * dim, *dbetween = dinside + count * inner;
    float *dfirst = to, *dfirst_bias = dfirst + wide * dim, *dlast = dfirst_bias + wide;
    float *dlast_bias = dlast + dim * inner, *dnorm = dlast_bias + dim;

    const T* given = grad;  // the gradient of what the last layer gave
    if (s.drop.kept != 0.0f) {
      weft::drop<T>(s.drop, static_cast<const T*>(s.grad), nullptr, added - from * dim, from * dim, (from + count) * dim);
      given = added;
    }
    times(count, given, dim, last, inner, some, [&](int64_t n, int64_t w, const float* z) {
      put(count, n, w, z, nullptr, dinside, inner);
    });
    if (s.attention.rows) {
      attend(begin, end, between, dinside, dbetween);
      turn(dbetween, count, -1.0f);
    } else {
      with_activation(s.activation, [&](auto f) {
        activations(count, [&](int64_t in, int64_t out, int64_t n) {
          const T *x = between + in + (gated ? inner : 0), *by = gated ? between + in : nullptr;
          T *dx = dbetween + in + (gated ? inner : 0), *dby = gated ? dbetween + in : nullptr;
          activate_back<decltype(f)::value>(x, by, dinside + out, dx, dby, n);
        });
      });
    }
    add_gradients(count, given, dim, inside, inner, dlast, dlast_bias, woven, panel);
    T* dnormed = added;  // what was there is not needed any more
    times(count, dbetween, wide, first, dim, some, [&](int64_t n, int64_t w, const float* z) {
      put(count, n, w, z, nullptr, dnormed, dim);
    });
    normalise(s.norm, from, from + count, normed - from * dim, true);
    add_gradients(count, dbetween, wide, normed, dim, dfirst, dfirst_bias, woven, panel);
    normalise_back(s.norm, from, from + count, dnormed - from * dim, static_cast<T*>(s.dx), norms,
                   static_cast<const T*>(s.grad));
    for (int64_t i = 0; i < 2 * dim; i += LANES) store(dnorm + i, load(dnorm + i) + load(norms + i));
  }
};

}  // namespace sublayers

// The whole of a sub-layer, by several threads. A thread's share of the sequences depends on how many there are, and
// with it the order in which gradients are summed; nothing else does.
template <class T>
inline void sublayer(const Sublayer& s, bool back, int threads) {
  static thread_local std::vector<float> memory;  // of this call; others use it while it waits for them
  sublayers::Work<T> work(s, back);
  const int workers = int(std::max<int64_t>(1, std::min<int64_t>(threads, work.tiles)));
  const int64_t own = work.room() + (back ? work.size : 0);
  memory.resize(work.packed() + workers * own);
  work.first = memory.data();
  work.last = work.first + work.wide * work.dim / sublayers::Work<T>::E::DEEP;
  float* rooms = memory.data() + work.packed();
  std::atomic<bool> failed{false};  // what is thrown must not leave its thread
  shared_out(workers, [&](int worker) { work.pack(worker, workers); });
  const auto sums = [&](int worker) { return worker ? rooms + worker * own + work.room() : s.gradients; };
  shared_out(workers, [&](int worker) {
    const int64_t begin = work.tiles * worker / workers, end = work.tiles * (worker + 1) / workers;
    float* room = rooms + worker * own;
    if (back) std::fill(sums(worker), sums(worker) + work.size, 0.0f);
    try {
      for (int64_t tile = begin; tile < end; tile++)
        back ? work.backward(tile, room, sums(worker)) : work.forward(tile, room);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  });
  if (failed) throw std::bad_alloc();
  if (!back || workers == 1) return;
  shared_out(workers, [&](int worker) {
    const int64_t vectors = work.size / LANES;
    const int64_t begin = vectors * worker / workers * LANES, end = vectors * (worker + 1) / workers * LANES;
    for (int other = 1; other < workers; other++) {
      const float* from = sums(other);
      for (int64_t i = begin; i < end; i += LANES) store(s.gradients + i, load(s.gradients + i) + load(from + i));
    }
  });
}

}  // namespace weft
