// What Python calls; see weft/models/compiled.py and weft/kernels/losses.py, output.py,
// embedding.py, heads.py, rows.py, sublayers.py, additive.py and updates.py.

#include <atomic>
#include <new>

#include "additive.h"
#include "attention.h"
#include "embedding.h"
#include "losses.h"
#include "output.h"
#include "rows.h"
#include "search.h"
#include "sublayers.h"
#include "updates.h"

using namespace weft;

namespace {

constexpr int FEW = 16;           // rows that are worth a thread
constexpr int64_t PIECE = 4096;  // numbers of a pass that are worth one
constexpr int64_t BLOCK = 64;    // rows of which the gradients of one vector are summed together

// 0, or 1 if there was not enough memory for f.
template <class F>
int32_t memory_for(F f) {
  try {
    f();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// f(begin, end) over all rows, by several threads if each has at least `few`; a thread takes at most `many` at a time.
template <class F>
void share(int rows, int threads, int few, int many, F f) {
  const int workers = std::max(1, std::min(threads, rows / std::max(few, 1)));
  std::atomic<bool> failed{false};  // what is thrown must not leave its thread
  shared_out(workers, [&](int worker) {
    const int from = int(int64_t(rows) * worker / workers), to = int(int64_t(rows) * (worker + 1) / workers);
    const int turns = (to - from + many - 1) / many;
    const int32_t missing = memory_for([&] {
      for (int turn = 0; turn < turns; turn++)
        f(from + int(int64_t(to - from) * turn / turns), from + int(int64_t(to - from) * (turn + 1) / turns));
    });
    if (missing) failed = true;
  });
  if (failed) throw std::bad_alloc();
}

// f(begin, end) over so many numbers, in pieces.
template <class F>
void pass(int64_t count, int threads, F f) {
  share(int((count + PIECE - 1) / PIECE), threads, 2, 1 << 30,
        [&](int begin, int end) { f(begin * PIECE, std::min(end * PIECE, count)); });
}

// f(a null pointer) of what the numbers are: bf16 if narrow, else float.
template <class F>
void with_type(int32_t narrow, F f) {
  narrow ? f(static_cast<bf16*>(nullptr)) : f(static_cast<float*>(nullptr));
}

// to [n] = the sum of n numbers of each block, which are `apart` from one to the next.
void gathered(const float* from, int64_t blocks, int64_t apart, int64_t n, float* to) {
  std::fill(to, to + n, 0.0f);
  for (int64_t block = 0; block < blocks; block++, from += apart)
    each(n, [&](auto at) { at.put(to, at.get(to) + at.get(from)); });
}

template <class T>
T* as(T*, void* x) { return static_cast<T*>(x); }
template <class T>
const T* as(T*, const void* x) { return static_cast<const T*>(x); }

}  // namespace

// What gives int32_t gives 0, or 1 for a lack of memory, if nothing else is said.
extern "C" {

int32_t weft_panel() { return WIDE; }

// How many blocks so many rows have: these are summed one by one, and then their sums, whatever the threads.
int64_t weft_blocks(int64_t rows) { return (rows + BLOCK - 1) / BLOCK; }

// A hash of some of the 32-bit words of tensors, to see whether they were changed.
int32_t weft_sample(const uint32_t* const* tensors, const int64_t* words, int32_t count) {
  constexpr int64_t SOME = 64;
  uint32_t hash = 2166136261u;
  for (int32_t t = 0; t < count; t++)
    for (int64_t i = 0; i < std::min(words[t], SOME); i++)
      hash = (hash ^ tensors[t][words[t] <= SOME ? i : words[t] / SOME * i]) * 16777619u;
  return int32_t(hash);
}

void weft_pack(const char* weight, char* packed, int64_t out, int64_t in, int32_t kind) {
  pack(weight, packed, out, in, kind);
}

void weft_linear(const float* x, int32_t rows, const Matrix* w, float* y, int32_t threads) {
  share(rows, threads, FEW, 4096, [&](int begin, int end) {
    multiply(x + int64_t(begin) * w->in, end - begin, *w, y + int64_t(begin) * w->out, w->out);
  });
}

// z: float, or bf16 if narrow
int32_t weft_cross_entropy(void* z, int32_t narrow, int32_t rows, int64_t n, const int64_t* targets, float smoothing,
                           int32_t train, Cost* costs, int32_t threads) {
  return memory_for([&] {
    share(rows, threads, FEW, rows + 1, [&](int begin, int end) {
      with_type(narrow, [&](auto type) {
        cross_entropy(as(type, z) + begin * n, end - begin, n, n, targets + begin, smoothing, train, costs + begin);
      });
    });
  });
}

int32_t weft_rdrop(void* z, void* y, int32_t narrow, int32_t rows, int64_t n, const int64_t* targets, float smoothing,
                   float apart, int32_t train, Cost* costs, float* divergences, int32_t threads) {
  return memory_for([&] {
    share(rows, threads, FEW, rows + 1, [&](int begin, int end) {
      with_type(narrow, [&](auto type) {
        rdrop(as(type, z) + begin * n, as(type, y) + begin * n, end - begin, n, n, targets + begin, smoothing, apart,
              train, costs + begin, divergences + begin);
      });
    });
  });
}

int32_t weft_output(const Output* o, int32_t threads) {
  return memory_for([&] {
    attention::with_type(o->narrow, [&](auto number, auto engine) {
      output<decltype(number), decltype(engine)>(*o, threads);
    });
  });
}

int32_t weft_attend(const Attention* a, int32_t back, int32_t threads) {
  return memory_for([&] {
    share(int(a->rows * a->groups), threads, 2, 1 << 30, [&](int begin, int end) {
      attention::with_type(a->narrow, [&](auto number, auto engine) {
        const typename decltype(engine)::Unit unit;
        attend<decltype(number), decltype(engine)>(*a, begin, end, back);
      });
    });
  });
}

// So many sub-layers, one after the other; backward from the last to the first.
int32_t weft_sublayers(const Sublayer* all, int32_t count, int32_t back, int32_t threads) {
  return memory_for([&] {
    for (int32_t i = 0; i < count; i++) {
      const Sublayer& s = all[back ? count - 1 - i : i];
      attention::with_type(s.norm.narrow, [&](auto number, auto engine) {
        sublayer<decltype(number), decltype(engine)>(s, back, threads);
      });
    }
  });
}

// Whether bf16 is multiplied as such: not (0), by vectors (1), by blocks (2).
int32_t weft_multiplies_bf16() {
  int32_t found = 0;
  attention::with_type(true, [&](auto, auto engine) {
    using E = decltype(engine);
    found = attention::TILED<E> ? 2 : E::DEEP == 2;
  });
  return found;
}

void weft_look(const Additive* a, const Look* s, int32_t back, int32_t threads) {
  share(int(a->rows), threads, 2, 1 << 30,
        [&](int begin, int end) { back ? look_back(*a, *s, begin, end) : look(*a, *s, begin, end); });
}

// steps: [count]; sums: [blocks, dim], room.
void weft_look_all(const Additive* a, const Look* steps, int64_t count, float* dk, float* dv, float* denergy, float* sums,
                   int32_t threads) {
  const int64_t blocks = weft_blocks(a->rows);
  share(int(blocks), threads, 1, 1, [&](int begin, int end) {
    for (int64_t block = begin; block < end; block++)
      look_all(*a, steps, count, block * BLOCK, std::min((block + 1) * BLOCK, a->rows), dk, dv, sums + block * a->dim);
  });
  gathered(sums, blocks, a->dim, a->dim, denergy);
}

void weft_norm(const Norming* a, void* y, int32_t threads) {
  share(int(a->rows), threads, FEW, 1 << 30, [&](int begin, int end) {
    with_type(a->narrow, [&](auto type) { normalise(*a, begin, end, as(type, y)); });
  });
}

// sums: [blocks, 2, n], room; dbias may be null.
void weft_norm_back(const Norming* a, const void* grad, void* dx, float* dweight, float* dbias, float* sums,
                    int32_t threads) {
  const int64_t blocks = weft_blocks(a->rows);
  share(int(blocks), threads, 1, 1, [&](int begin, int end) {
    for (int64_t block = begin; block < end; block++)
      with_type(a->narrow, [&](auto type) {
        normalise_back(*a, block * BLOCK, std::min((block + 1) * BLOCK, a->rows), as(type, grad), as(type, dx),
                       sums + block * 2 * a->n);
      });
  });
  gathered(sums, blocks, 2 * a->n, a->n, dweight);
  if (dbias != nullptr) gathered(sums + a->n, blocks, 2 * a->n, a->n, dbias);
}

void weft_activate(int32_t activation, int32_t narrow, int64_t count, const void* x, const void* by, void* y,
                   int32_t threads) {
  pass(count, threads, [&](int64_t begin, int64_t end) {
    with_type(narrow, [&](auto type) {
      with_activation(activation, [&](auto kind) {
        const auto* other = by ? as(type, by) + begin : nullptr;
        activate<decltype(kind)::value>(as(type, x) + begin, other, as(type, y) + begin, end - begin);
      });
    });
  });
}

void weft_activate_back(int32_t activation, int32_t narrow, int64_t count, const void* x, const void* by,
                        const void* grad, void* dx, void* dby, int32_t threads) {
  pass(count, threads, [&](int64_t begin, int64_t end) {
    with_type(narrow, [&](auto type) {
      with_activation(activation, [&](auto kind) {
        const auto* other = by ? as(type, by) + begin : nullptr;
        auto* dother = by ? as(type, dby) + begin : nullptr;
        activate_back<decltype(kind)::value>(as(type, x) + begin, other, as(type, grad) + begin, as(type, dx) + begin,
                                             dother, end - begin);
      });
    });
  });
}

void weft_add(const bf16* x, float* to, int64_t count, int32_t threads) {
  pass(count, threads, [&](int64_t begin, int64_t end) { add(x + begin, to + begin, end - begin); });
}

void weft_drop(const Drop* a, int32_t narrow, const void* x, const void* onto, void* y, int32_t threads) {
  pass(a->count, threads, [&](int64_t begin, int64_t end) {
    with_type(narrow, [&](auto type) { drop(*a, as(type, x), as(type, onto), as(type, y), begin, end); });
  });
}

// 1: a number is not in the table.
int32_t weft_embed(const Embedding* e, int32_t narrow, void* y, int32_t threads) {
  std::atomic<bool> known{true};
  share(int(e->count), threads, FEW, 1 << 30, [&](int begin, int end) {
    with_type(narrow, [&](auto type) {
      if (!embed(*e, begin, end, as(type, y))) known = false;
    });
  });
  return !known;
}

// table [words, dim] and added [period, dim], or null: zeros, to which the gradients are added.
void weft_embed_back(const Embedding* e, int32_t narrow, const void* grad, float* table, float* added, int32_t threads) {
  const int64_t vectors = (e->dim + LANES - 1) / LANES;
  share(int(vectors), threads, 1, 1 << 30, [&](int begin, int end) {
    with_type(narrow, [&](auto type) {
      embed_back(*e, as(type, grad), begin * LANES, std::min<int64_t>(end * LANES, e->dim), table, added);
    });
  });
}

// squares: the sum of those of all gradients.
int32_t weft_squares(const Parameter* parameters, int32_t count, double* squares, int32_t threads) {
  return memory_for([&] {
    const auto pieces = updates::pieces(parameters, count);
    std::vector<double> sums(pieces.size());
    share(int(pieces.size()), threads, 2, 1 << 30, [&](int begin, int end) {
      for (int i = begin; i < end; i++) sums[i] = updates::squares(pieces[i]);
    });
    *squares = 0.0;
    for (double one : sums) *squares += one;
  });
}

int32_t weft_adamw(const Parameter* parameters, int32_t count, const AdamW* a, int32_t threads) {
  return memory_for([&] {
    const auto pieces = updates::pieces(parameters, count);
    share(int(pieces.size()), threads, 2, 1 << 30, [&](int begin, int end) {
      for (int i = begin; i < end; i++) updates::update(pieces[i], *a);
    });
  });
}

// memory: [layers, all source tokens, 2 · kv]
void weft_encode(const Model* m, const int64_t* tokens, const int64_t* starts, int32_t sentences, float* memory,
                 int32_t threads) {
  const int64_t all = starts[sentences], kv = 2 * m->kv_heads * m->head_dim;
  const int length = int(std::max<int64_t>(1, all / std::max(sentences, 1)));
  share(sentences, threads, std::max(1, 2 * FEW / length), std::max(1, many(*m) / length),
        [&](int begin, int end) { encode(*m, tokens, starts, begin, end, memory + starts[begin] * kv, all * kv); });
}

// sentence: [R] which of the sources that weft_encode was given; hidden: [R, T, dim]
void weft_step(const Model* m, const Step* s, const float* memory, const int64_t* sentence, const int64_t* starts,
               int64_t source_tokens, int32_t rows, float* hidden, int32_t threads) {
  const int64_t kv = 2 * m->kv_heads * m->head_dim;
  std::vector<Memory> own;
  for (int r = 0; r < rows; r++) {
    const int64_t from = starts[sentence[r]];
    own.push_back({memory + from * kv, source_tokens * kv, starts[sentence[r] + 1] - from});
  }
  Step with = *s;
  with.memory = own.data();
  const int t = std::max(s->count, 1);
  share(rows, threads, std::max(1, FEW / t), std::max(1, many(*m) / t),
        [&](int begin, int end) { step(*m, with, begin, end, hidden + int64_t(begin) * t * m->dim); });
}

void weft_best(const Model* m, const float* hidden, int32_t rows, int32_t k, const int64_t* never, int32_t nevers,
               float* values, int64_t* tokens, int32_t threads) {
  share(rows, threads, FEW, 256, [&](int begin, int end) {
    best(*m, hidden + int64_t(begin) * m->dim, end - begin, k, never, nevers, values + int64_t(begin) * k,
         tokens + int64_t(begin) * k);
  });
}

void weft_normalise(float* logits, int32_t rows, int64_t n, int32_t threads) {
  share(rows, threads, FEW, rows + 1, [&](int begin, int end) {
    for (int r = begin; r < end; r++) normalise(logits + r * n, n);
  });
}

int32_t weft_search(const Model* m, const Wanted* wanted, const Sources* sources, Found* found, int32_t (*stop)(),
                    int32_t threads) {
  return search(*m, *wanted, *sources, found, stop, threads);
}
}
