// What Python calls; see weft/models/compiled.py, weft/kernels/losses.py and weft/kernels/heads.py.

#include "attention.h"
#include "losses.h"
#include "search.h"

using namespace weft;

namespace {

constexpr int FEW = 16;  // rows that are worth a thread

// f(begin, end) over all rows, by several threads if each has at least `few`; a thread takes at most `many` at a time.
template <class F>
void share(int rows, int threads, int few, int many, F f) {
  const int workers = std::max(1, std::min(threads, rows / std::max(few, 1)));
  shared_out(workers, [&](int worker) {
    const int from = int(int64_t(rows) * worker / workers), to = int(int64_t(rows) * (worker + 1) / workers);
    const int turns = (to - from + many - 1) / many;
    for (int turn = 0; turn < turns; turn++)
      f(from + int(int64_t(to - from) * turn / turns), from + int(int64_t(to - from) * (turn + 1) / turns));
  });
}

}  // namespace

extern "C" {

int32_t weft_panel() { return WIDE; }

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
void weft_cross_entropy(void* z, int32_t narrow, int32_t rows, int64_t n, const int64_t* targets, float smoothing,
                        int32_t train, Cost* costs, int32_t threads) {
  share(rows, threads, FEW, rows + 1, [&](int begin, int end) {
    const auto part = [&](auto* logits) {
      cross_entropy(logits + begin * n, end - begin, n, targets + begin, smoothing, train, costs + begin);
    };
    narrow ? part(static_cast<bf16*>(z)) : part(static_cast<float*>(z));
  });
}

void weft_rdrop(void* z, void* y, int32_t narrow, int32_t rows, int64_t n, const int64_t* targets, float smoothing,
                float apart, int32_t train, Cost* costs, float* divergences, int32_t threads) {
  share(rows, threads, FEW, rows + 1, [&](int begin, int end) {
    const auto part = [&](auto* one, auto* two) {
      rdrop(one + begin * n, two + begin * n, end - begin, n, targets + begin, smoothing, apart, train, costs + begin,
            divergences + begin);
    };
    narrow ? part(static_cast<bf16*>(z), static_cast<bf16*>(y)) : part(static_cast<float*>(z), static_cast<float*>(y));
  });
}

void weft_attend(const Attention* a, int32_t back, int32_t threads) {
  share(int(a->rows * a->groups), threads, 2, 1 << 30, [&](int begin, int end) {
    a->narrow ? attend<bf16>(*a, begin, end, back) : attend<float>(*a, begin, end, back);
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
