// A whole sub-layer of training in one call, and its gradients: x + dropout(f(norm(x))), where f is a feed-forward or
// self-attention. Some sequences at a time go through all of it while they are near; the rest of the memory sees what
// must be kept for the way back, and that once.
//
// What is read and written is float or bf16, and so are the factors of products; all sums are in float. Every width is
// in whole vectors.
#pragma once

#include "memory.h"
#include "packing.h"
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

using packing::Kept;
using packing::Packing;
using packing::PANEL;

constexpr int64_t TILE = 128;     // rows that go through a sub-layer together, or a sequence, if that is longer
constexpr int64_t TOGETHER = 512; // rows of a thread whose gradients of layers are multiplied together, or a tile

// sums [width] += rows of x.
template <class T>
inline void add_rows(int64_t rows, const T* x, int64_t width, float* sums) {
  const auto some = [&](int64_t i, auto count) {  // the vectors of a line of memory at a time
    constexpr int V = decltype(count)::value;
    Floats all[V];
    for (int v = 0; v < V; v++) all[v] = load(sums + i + v * LANES);
    for (int64_t r = 0; r < rows; r++)
      for (int v = 0; v < V; v++) all[v] += load(x + r * width + i + v * LANES);
    for (int v = 0; v < V; v++) store(sums + i + v * LANES, all[v]);
  };
  int64_t i = 0;
  for (; i + 4 * LANES <= width; i += 4 * LANES) some(i, std::integral_constant<int, 4>());
  for (; i < width; i += LANES) some(i, std::integral_constant<int, 1>());
}

// Where the gradients of parameters go, or are added up.
struct Gradients {
  float *first, *first_bias, *last, *last_bias, *norm;
};

// Everything that one call works on.
template <class T, class E>
struct Work {
  const Sublayer& s;
  const bool back, gated;
  const int64_t dim, wide, inner, sequences, together, count;
  float *first, *last;  // the layers in panels, as this pass multiplies by them

  Work(const Sublayer& s, bool back)
      : s(s), back(back), gated(!s.attention.rows && s.activation == SWIGLU), dim(s.norm.n), wide(s.first.out()),
        inner(s.last.in), sequences(s.norm.rows / s.length), together(std::max<int64_t>(1, TILE / s.length)),
        count((sequences + together - 1) / together) {}

  int64_t size() const { return wide * dim + wide + dim * inner + 3 * dim; }  // of the gradients
  int64_t most() const { return together * s.length; }                         // rows of a tile
  int64_t packed_first() const { return back ? Packing<E>::size(wide, dim) : Packing<E>::size(dim, wide); }
  int64_t packed_last() const { return back ? Packing<E>::size(dim, inner) : Packing<E>::size(inner, dim); }

  Gradients gradients(float* at) const {
    float *first_bias = at + wide * dim, *last = first_bias + wide, *last_bias = last + dim * inner;
    return {at, first_bias, last, last_bias, last_bias + dim};
  }

  // Floats that a thread needs for a tile.
  int64_t room() const {
    const int64_t vectors = 2 * dim + inner + wide;  // of T
    return aligned(2 * dim) + Packing<E>::room(most(), std::max({wide, inner, dim})) + aligned(most() * vectors);
  }

  // Panels from number `begin` on, each step-th.
  void pack(int begin, int step) {
    int turn = 0;
    const auto each_panel = [&](const Joined& layer, int64_t depth, int64_t width, float* to) {
      packing::panels(width, [&](int64_t n, int64_t w) {
        if (turn++ % step != begin) return;
        if (back)
          Packing<E>::pack(depth, n, w, 0, depth, [&](int64_t k) { return layer.row(k) + n; }, to);
        else
          Packing<E>::pack_turned(depth, n, w, [&](int64_t i) { return layer.row(n + i); }, to);
      });
    };
    each_panel(s.first, back ? wide : dim, back ? dim : wide, first);
    each_panel(s.last, back ? dim : inner, back ? inner : dim, last);
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
    weft::attend<T, E>(a, begin * a.groups, end * a.groups, back);
  }

  void forward(int64_t tile, float* memory) const {
    const int64_t begin = tile * together, end = std::min(begin + together, sequences);
    const int64_t from = begin * s.length, rows = (end - begin) * s.length;
    const T* x = static_cast<const T*>(s.norm.x) + from * dim;
    T *between = static_cast<T*>(s.between) + from * wide, *y = static_cast<T*>(s.y) + from * dim;
    T* inside = static_cast<T*>(s.inside) + from * inner;
    T* normed = reinterpret_cast<T*>(memory);
    float* some = memory + aligned(rows * dim);
    normalise(s.norm, from, from + rows, normed - from * dim);
    Packing<E>::times(rows, normed, dim, dim, first, wide, some, put(&s.first, between, wide));
    if (s.attention.rows) {
      turn(between, rows, 1.0f);
      attend(begin, end, between, inside, between);
    } else {
      with_activation(s.activation, [&](auto f) {
        activations(rows, [&](int64_t in, int64_t out, int64_t n) {
          const T* given = between + in;
          activate<decltype(f)::value>(gated ? given + inner : given, gated ? given : nullptr, inside + out, n);
        });
      });
    }
    Packing<E>::times(rows, inside, inner, inner, last, dim, some,
                      put(&s.last, y, dim, s.drop.kept == 0.0f ? x : nullptr));
    if (s.drop.kept != 0.0f) {
      T* whole = static_cast<T*>(s.y);
      weft::drop(s.drop, whole, static_cast<const T*>(s.norm.x), whole, from * dim, (from + rows) * dim);
    }
  }

  // Puts into y [rows, width] what a product gives, the bias of these layers, and more, if there are any.
  static auto put(const Joined* layers, T* y, int64_t width, const T* onto = nullptr) {
    return [=](int64_t n) {  // a vector of columns is of one layer
      const float* bias = layers == nullptr ? nullptr : layers->bias_at(n);
      const Floats more = bias == nullptr ? Floats{} : load(bias);
      return [=](int64_t r, Floats sum) {
        sum += more;
        store(y + r * width + n, onto == nullptr ? sum : sum + load(onto + r * width + n));
      };
    };
  }

  // The gradient of x; and add(of the last layer, the gradient of what it gave and what it took; rows) and the same of
  // the first for the gradients of layers. Those of the rest are added to `to`.
  template <class F>
  void backward(int64_t tile, float* memory, const Gradients& to, F add) const {
    const int64_t begin = tile * together, end = std::min(begin + together, sequences);
    const int64_t from = begin * s.length, rows = (end - begin) * s.length;
    T* between = static_cast<T*>(s.between) + from * wide;
    const T *grad = static_cast<const T*>(s.grad) + from * dim, *inside = static_cast<T*>(s.inside) + from * inner;
    float *norms = memory, *some = norms + aligned(2 * dim);
    T* normed = reinterpret_cast<T*>(some + Packing<E>::room(most(), std::max({wide, inner, dim})));
    T *added = normed + rows * dim, *dinside = added + rows * dim, *dbetween = dinside + rows * inner;

    const T* given = grad;  // the gradient of what the last layer gave
    if (s.drop.kept != 0.0f) {
      weft::drop<T>(s.drop, static_cast<const T*>(s.grad), nullptr, added - from * dim, from * dim, (from + rows) * dim);
      given = added;
    }
    Packing<E>::times(rows, given, dim, dim, last, inner, some, put(nullptr, dinside, inner));
    if (s.attention.rows) {
      attend(begin, end, between, dinside, dbetween);
      turn(dbetween, rows, -1.0f);
    } else {
      with_activation(s.activation, [&](auto f) {
        activations(rows, [&](int64_t in, int64_t out, int64_t n) {
          const T *x = between + in + (gated ? inner : 0), *by = gated ? between + in : nullptr;
          T *dx = dbetween + in + (gated ? inner : 0), *dby = gated ? dbetween + in : nullptr;
          activate_back<decltype(f)::value>(x, by, dinside + out, dx, dby, n);
        });
      });
    }
    add(true, rows, given, inside);
    add_rows(rows, given, dim, to.last_bias);
    T* dnormed = added;  // what was there is not needed any more
    Packing<E>::times(rows, dbetween, wide, wide, first, dim, some, put(nullptr, dnormed, dim));
    normalise(s.norm, from, from + rows, normed - from * dim, true);
    add(false, rows, dbetween, normed);
    add_rows(rows, dbetween, wide, to.first_bias);
    normalise_back(s.norm, from, from + rows, dnormed - from * dim, static_cast<T*>(s.dx), norms,
                   static_cast<const T*>(s.grad));
    for (int64_t i = 0; i < 2 * dim; i += LANES) store(to.norm + i, load(to.norm + i) + load(norms + i));
  }
};

template <class T, class E>
inline void forward(Work<T, E>& work, int workers) {
  const int64_t room = work.room();
  Workspace memory(work.packed_first() + work.packed_last() + workers * room + 4 * ALIGNED);
  work.first = memory.take(work.packed_first()), work.last = memory.take(work.packed_last());
  float* rooms = memory.take(workers * room);
  all_of(workers, [&](int worker) { work.pack(worker, workers); });
  all_of(workers, [&](int worker) {
    const typename E::Unit unit;
    for (int64_t tile = work.count * worker / workers; tile < work.count * (worker + 1) / workers; tile++)
      work.forward(tile, rooms + worker * room);
  });
}

// The gradients of layers are products over the rows of several tiles, so that sums stay where they are made and no
// thread has any of its own. The rest is summed tile by tile. So nothing depends on the threads.
template <class T, class E>
inline void backward(Work<T, E>& work, int workers) {
  using Kept = packing::Kept<E>;
  const int64_t room = work.room(), few = aligned(work.wide + 3 * work.dim), steps = Kept::steps_of(work.most());
  const int64_t some = std::min(work.count, workers * std::max<int64_t>(1, TOGETHER / work.most()));  // tiles at a time
  const int64_t sides[] = {work.dim, work.inner, work.wide, work.dim};
  int64_t kept = 0;
  for (int64_t side : sides) kept += aligned(Kept::size(side, some * steps));
  Workspace memory(work.packed_first() + work.packed_last() + workers * room + work.count * few + kept + 8 * ALIGNED);
  work.first = memory.take(work.packed_first()), work.last = memory.take(work.packed_last());
  float *rooms = memory.take(workers * room), *sums = memory.take(work.count * few);
  const auto taken = [&](int64_t side) { return memory.take(Kept::size(side, some * steps)); };
  float *of_dim = taken(work.dim), *of_inner = taken(work.inner), *of_wide = taken(work.wide);
  const Kept last = {of_dim, of_inner, work.dim, work.inner, some * steps};
  const Kept first = {of_wide, taken(work.dim), work.wide, work.dim, some * steps};
  const Gradients to = work.gradients(work.s.gradients);
  all_of(workers, [&](int worker) { work.pack(worker, workers); });
  for (int64_t begin = 0; begin < work.count; begin += some) {
    const int64_t end = std::min(begin + some, work.count);
    all_of(workers, [&](int worker) {
      const typename E::Unit unit;
      const int64_t from = begin + (end - begin) * worker / workers, until = begin + (end - begin) * (worker + 1) / workers;
      for (int64_t tile = from; tile < until; tile++) {
        float* own = sums + tile * few;
        std::fill(own, own + few, 0.0f);
        const Gradients here = {nullptr, own, nullptr, own + work.wide, own + work.wide + work.dim};
        work.backward(tile, rooms + worker * room, here, [&](bool of_last, int64_t rows, const T* grad, const T* x) {
          const Kept& kept = of_last ? last : first;
          kept.keep((tile - begin) * steps, rows, grad, kept.out, x, kept.in);
        });
      }
    });
    const int64_t left = std::min(end * work.most(), work.s.norm.rows) - (end - 1) * work.most();  // rows of the last tile
    const int64_t deep = (end - begin - 1) * steps + Kept::steps_of(left);
    all_of(workers, [&](int worker) {
      const typename E::Unit unit;
      last.multiply(deep, to.last, begin > 0, worker, workers);
      first.multiply(deep, to.first, begin > 0, worker, workers);
    });
  }
  const auto summed = [&](float* at, int64_t n, int64_t from) {
    std::fill(at, at + n, 0.0f);
    for (int64_t tile = 0; tile < work.count; tile++) add(sums + tile * few + from, at, n);
  };
  summed(to.first_bias, work.wide, 0), summed(to.last_bias, work.dim, work.wide);
  summed(to.norm, 2 * work.dim, work.wide + work.dim);
}

}  // namespace sublayers

// The whole of a sub-layer, by several threads.
template <class T, class E>
inline void sublayer(const Sublayer& s, bool back, int threads) {
  sublayers::Work<T, E> work(s, back);
  const int workers = int(std::max<int64_t>(1, std::min<int64_t>(threads, work.count)));
  back ? sublayers::backward(work, workers) : sublayers::forward(work, workers);
}

}  // namespace weft
