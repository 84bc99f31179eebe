// The encoder-decoder Transformer of weft/models/transformer.py: a source, a step, and the best tokens to come next.
//
// A row is a target (or source) token. Rows are independent but for attention, so a thread takes some of them through
// all layers and meets the others only at the end. Sources stand one behind the other without padding. Keys and values
// of the target are kept in slots, which are written once; a row knows the slots of its past, and a beam that goes on
// from another copies that list and nothing else.
//
// weft/models/compiled.py says the same structures in ctypes.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "activations.h"
#include "memory.h"
#include "products.h"

namespace weft {

enum NormKind { NONE, LAYER, RMS };

struct Norm {
  const float* weight;
  const float* bias;
  float eps;
  int32_t kind;
};

struct Block {
  Norm attention_norm, cross_norm, feed_norm;
  Matrix attention_in, attention_out;           // query, key and value in one
  Matrix cross_query, cross_memory, cross_out;  // key and value in one
  Matrix inner, gate, outer;
};

struct Model {
  int32_t dim, heads, kv_heads, head_dim, norm_first, activation;
  int32_t encoder_layers, decoder_layers;
  float scale;  // of embeddings
  const Block* encoder;
  const Block* decoder;
  Norm encoder_norm, decoder_norm;
  Matrix source, target, output;  // embeddings, which may be the output too
  const float* source_places;     // what is added at each place; may be null
  const float* target_places;
  const float* source_turns;  // cos and sin, head_dim / 2 each, by which queries and keys of each place are turned; may
  const float* target_turns;  // be null
};

// Keys and values that were made of a source, for every decoder layer: entries + l · stride is [count, 2 · kv].
struct Memory {
  const float* entries;
  int64_t stride, count;
};

// R rows of T tokens each, to be consumed.
struct Step {
  const int64_t* tokens;   // [R, T]
  const int64_t* lengths;  // [R] tokens that were consumed before
  const Memory* memory;    // [R]
  const int32_t* slots;    // [R, width] of each row's tokens, those of this step included
  float* store;            // [layers, all_slots, 2 · kv]
  int64_t all_slots;
  int32_t width, count;  // T
};

inline float dot(const float* a, const float* b, int n) {
  Floats total = {};
  int i = 0;
  for (; i + LANES <= n; i += LANES) total += load(a + i) * load(b + i);
  float y = sum(total);
  for (; i < n; i++) y += a[i] * b[i];
  return y;
}

inline float sum(const float* x, int n) {
  Floats total = {};
  int i = 0;
  for (; i + LANES <= n; i += LANES) total += load(x + i);
  float y = sum(total);
  for (; i < n; i++) y += x[i];
  return y;
}

// y = norm(x) of each row; y may be x.
inline void normalise(const Norm& norm, const float* x, float* y, int rows, int n) {
  if (norm.kind == NONE) {
    if (x != y) std::copy_n(x, int64_t(rows) * n, y);
    return;
  }
  for (int r = 0; r < rows; r++, x += n, y += n) {
    const float mean = norm.kind == LAYER ? sum(x, n) / n : 0.0f;
    each(n, [&](auto at) { at.put(y, at.get(x) - mean); });
    const float by = 1.0f / std::sqrt(dot(y, y, n) / n + norm.eps);
    each(n, [&](auto at) {
      const auto scaled = at.get(y) * by * at.get(norm.weight);
      at.put(y, norm.bias ? scaled + at.get(norm.bias) : scaled);
    });
  }
}

// x = f(x), or f(gate) · x; the memory behind them is a multiple of LANES long.
inline void activate(float* x, const float* gate, int64_t n, int activation) {
  for (int64_t i = 0; i < n; i += LANES)
    store(x + i, gate ? activated(load(gate + i), activation) * load(x + i) : activated(load(x + i), activation));
}

// What a thread needs room for; it stays for the next time.
struct Room {
  std::vector<float> x, y, wide, gate, mixed, scores;
  std::vector<const float*> keys;

  static Room& of(const Model& m, int64_t rows, int64_t longest) {
    static thread_local Room room;
    const int64_t kv = m.kv_heads * m.head_dim, q = m.heads * m.head_dim;
    int64_t ffn = 0;
    for (int l = 0; l < m.encoder_layers; l++) ffn = std::max<int64_t>(ffn, m.encoder[l].inner.out);
    for (int l = 0; l < m.decoder_layers; l++) ffn = std::max<int64_t>(ffn, m.decoder[l].inner.out);
    at_least(room.x, rows * m.dim);
    at_least(room.y, rows * m.dim);
    at_least(room.mixed, rows * q);
    at_least(room.wide, rows * std::max(q + 2 * kv, ffn) + LANES);
    at_least(room.gate, m.activation == SWIGLU ? rows * ffn + LANES : 0);
    at_least(room.scores, longest + LANES);
    at_least(room.keys, longest);
    return room;
  }
};

// s = softmax(s) of `count` numbers; behind them there is room to the next multiple of LANES.
inline void softmax(float* s, int count) {
  for (int j = count; j % LANES; j++) s[j] = -std::numeric_limits<float>::infinity();
  Floats most = load(s), sums = {};
  for (int j = LANES; j < count; j += LANES) most = larger(most, load(s + j));
  const float top = largest(most);
  for (int j = 0; j < count; j += LANES) {
    const Floats e = exp(load(s + j) - top);
    sums += e;
    store(s + j, e);
  }
  const float by = 1.0f / sum(sums);
  for (int j = 0; j < count; j += LANES) store(s + j, load(s + j) * by);
}

// softmax(q kᵀ / √d) v of one row over the `count` keys that room.keys points to; values stand behind their keys.
// With N > 0 a head is N vectors wide, which stay in registers.
template <int N>
inline void attend_as(const Model& m, const float* q, int count, Room& room, float* out) {
  const int d = N ? N * LANES : m.head_dim, kv = m.kv_heads * d, share = m.heads / m.kv_heads;
  const float by = 1.0f / std::sqrt(float(d));
  float* s = room.scores.data();
  for (int h = 0; h < m.heads; h++, q += d, out += d) {
    const int part = h / share * d;
    if constexpr (N > 0) {
      Floats own[N], mixed[N] = {};
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) own[i] = load(q + i * LANES) * by;
      for (int j = 0; j < count; j++) {
        const float* key = room.keys[j] + part;
        Floats total = own[0] * load(key);
#pragma GCC unroll 8
        for (int i = 1; i < N; i++) total += own[i] * load(key + i * LANES);
        s[j] = sum(total);
      }
      softmax(s, count);
      for (int j = 0; j < count; j++) {
        const float* value = room.keys[j] + kv + part;
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) mixed[i] += s[j] * load(value + i * LANES);
      }
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) store(out + i * LANES, mixed[i]);
    } else {
      for (int j = 0; j < count; j++) s[j] = by * dot(q, room.keys[j] + part, d);
      softmax(s, count);
      std::fill(out, out + d, 0.0f);
      for (int j = 0; j < count; j++) {
        const float* value = room.keys[j] + kv + part;
        each(d, [&](auto at) { at.put(out, at.get(out) + s[j] * at.get(value)); });
      }
    }
  }
}

inline void attend(const Model& m, const float* q, int count, Room& room, float* out) {
  switch (m.head_dim % LANES ? 0 : m.head_dim / LANES) {
    case 1:
      return attend_as<1>(m, q, count, room, out);
    case 2:
      return attend_as<2>(m, q, count, room, out);
    case 4:
      return attend_as<4>(m, q, count, room, out);
    case 8:
      return attend_as<8>(m, q, count, room, out);
    default:
      return attend_as<0>(m, q, count, room, out);
  }
}

// Turns the heads of one row's queries, and of the keys behind them, to their place: entry i with entry i + d / 2.
inline void turn(const Model& m, const float* turns, int64_t place, float* x) {
  if (!turns) return;
  const int d = m.head_dim, half = d / 2;
  const float *cos = turns + place * d, *sin = cos + half;
  for (int h = 0; h < m.heads + m.kv_heads; h++, x += d)
    for (int i = 0; i < half; i++) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cos[i] - b * sin[i];
      x[i + half] = b * cos[i] + a * sin[i];
    }
}

// x = x + f(norm(x)), or norm(x + f(x)); `f(y)` adds to x.
template <class F>
void around(const Model& m, const Norm& norm, Room& room, int rows, F f) {
  if (m.norm_first) {
    normalise(norm, room.x.data(), room.y.data(), rows, m.dim);
    f(room.y.data());
  } else {
    std::copy_n(room.x.data(), int64_t(rows) * m.dim, room.y.data());
    f(room.y.data());
    normalise(norm, room.x.data(), room.x.data(), rows, m.dim);
  }
}

inline void feed_forward(const Model& m, const Block& block, Room& room, int rows) {
  around(m, block.feed_norm, room, rows, [&](const float* y) {
    const int ffn = block.inner.out;
    multiply(y, rows, block.inner, room.wide.data(), ffn, m.activation == RELU ? POSITIVE : WRITE);
    if (m.activation == SWIGLU) multiply(y, rows, block.gate, room.gate.data(), ffn);
    if (m.activation != RELU)
      activate(room.wide.data(), m.activation == SWIGLU ? room.gate.data() : nullptr, int64_t(rows) * ffn,
               m.activation);
    multiply(room.wide.data(), rows, block.outer, room.x.data(), m.dim, ADD);
  });
}

// The embedding of a token, scaled, with what its place adds.
inline void embed(const Matrix& table, int64_t token, float scale, const float* added, float* x) {
  const float by = table.scale ? scale * table.scale[token] : scale;
  for (int k = 0; k < table.in; k++) {
    const int64_t at = place(token, k, table.in, table.kind);
    float value = 0.0f;
    if (table.kind == FLOAT) value = static_cast<const float*>(table.panels)[at];
    if (table.kind == INT8) value = static_cast<const int8_t*>(table.panels)[at];
    if (table.kind == COARSE) value = static_cast<const uint8_t*>(table.panels)[at] - 128;
    if (table.kind == BF16) {
      const uint32_t bits = uint32_t(static_cast<const bf16*>(table.panels)[at].bits) << 16;
      std::memcpy(&value, &bits, 4);
    }
    x[k] = value * by + (added ? added[k] : 0.0f);
  }
}

// Sentences [begin, end), which stand in tokens from starts[s] to starts[s + 1]: keys and values for every decoder
// layer, from memory + l · stride on.
inline void encode(const Model& m, const int64_t* tokens, const int64_t* starts, int begin, int end, float* memory,
                   int64_t stride) {
  const int64_t first = starts[begin];
  const int rows = int(starts[end] - first), kv = m.kv_heads * m.head_dim, q = m.heads * m.head_dim, in = q + 2 * kv;
  int64_t longest = 0;
  for (int s = begin; s < end; s++) longest = std::max(longest, starts[s + 1] - starts[s]);
  Room& room = Room::of(m, rows, longest);
  for (int s = begin; s < end; s++)
    for (int64_t i = starts[s]; i < starts[s + 1]; i++) {
      const float* place = m.source_places ? m.source_places + (i - starts[s]) * m.dim : nullptr;
      embed(m.source, tokens[i], m.scale, place, room.x.data() + (i - first) * m.dim);
    }
  for (int l = 0; l < m.encoder_layers; l++) {
    const Block& block = m.encoder[l];
    around(m, block.attention_norm, room, rows, [&](const float* y) {
      multiply(y, rows, block.attention_in, room.wide.data(), in);
      for (int s = begin; s < end; s++) {
        const int64_t from = starts[s] - first, count = starts[s + 1] - starts[s];
        for (int64_t j = 0; j < count; j++) turn(m, m.source_turns, j, room.wide.data() + (from + j) * in);
        for (int64_t j = 0; j < count; j++) room.keys[j] = room.wide.data() + (from + j) * in + q;
        for (int64_t i = from; i < from + count; i++)
          attend(m, room.wide.data() + i * in, int(count), room, room.mixed.data() + i * q);
      }
      multiply(room.mixed.data(), rows, block.attention_out, room.x.data(), m.dim, ADD);
    });
    feed_forward(m, block, room, rows);
  }
  normalise(m.encoder_norm, room.x.data(), room.y.data(), rows, m.dim);
  for (int l = 0; l < m.decoder_layers; l++)
    multiply(room.y.data(), rows, m.decoder[l].cross_memory, memory + l * stride, 2 * kv);
}

// Rows [begin, end) of a step: hidden [end − begin, T, dim].
inline void step(const Model& m, const Step& s, int begin, int end, float* hidden) {
  const int t = s.count, rows = (end - begin) * t, kv = m.kv_heads * m.head_dim, q = m.heads * m.head_dim,
            in = q + 2 * kv;
  int64_t longest = s.width;
  for (int r = begin; r < end; r++) longest = std::max(longest, s.memory[r].count);
  Room& room = Room::of(m, rows, longest);
  const auto each_token = [&](auto f) {  // f(row of what is computed here, row of the step, which of its tokens)
    for (int r = begin; r < end; r++)
      for (int i = 0; i < t; i++) f(int64_t(r - begin) * t + i, int64_t(r), i);
  };
  const auto slot = [&](int64_t r, int64_t place, int l) {
    return s.store + (l * s.all_slots + s.slots[r * s.width + place]) * 2 * kv;
  };
  each_token([&](int64_t row, int64_t r, int i) {
    const float* added = m.target_places ? m.target_places + (s.lengths[r] + i) * m.dim : nullptr;
    embed(m.target, s.tokens[r * t + i], m.scale, added, room.x.data() + row * m.dim);
  });
  for (int l = 0; l < m.decoder_layers; l++) {
    const Block& block = m.decoder[l];
    around(m, block.attention_norm, room, rows, [&](const float* y) {
      multiply(y, rows, block.attention_in, room.wide.data(), in);
      each_token([&](int64_t row, int64_t r, int i) {
        turn(m, m.target_turns, s.lengths[r] + i, room.wide.data() + row * in);
        std::copy_n(room.wide.data() + row * in + q, 2 * kv, slot(r, s.lengths[r] + i, l));
      });
      each_token([&](int64_t row, int64_t r, int i) {
        const int count = int(s.lengths[r]) + i + 1;
        for (int j = 0; j < count; j++) room.keys[j] = slot(r, j, l);
        attend(m, room.wide.data() + row * in, count, room, room.mixed.data() + row * q);
      });
      multiply(room.mixed.data(), rows, block.attention_out, room.x.data(), m.dim, ADD);
    });
    around(m, block.cross_norm, room, rows, [&](const float* y) {
      multiply(y, rows, block.cross_query, room.wide.data(), q);
      each_token([&](int64_t row, int64_t r, int) {
        const Memory& memory = s.memory[r];
        for (int64_t j = 0; j < memory.count; j++) room.keys[j] = memory.entries + l * memory.stride + j * 2 * kv;
        attend(m, room.wide.data() + row * q, int(memory.count), room, room.mixed.data() + row * q);
      });
      multiply(room.mixed.data(), rows, block.cross_out, room.x.data(), m.dim, ADD);
    });
    feed_forward(m, block, room, rows);
  }
  normalise(m.decoder_norm, room.x.data(), hidden, rows, m.dim);
}

constexpr int GROUP = 4 * LANES;
constexpr int SEEN = 16 * GROUP;  // logits at a time, which stay in the cache; the order of a row's sum depends on it

// The k best of one row so far, best first; of equals the one with the lower number. And all it takes to know log Σ
// e^x.
struct Best {
  float* value;
  int64_t* token;
  int k, found = 0;
  float most = -std::numeric_limits<float>::infinity(), sums = 0.0f;

  void offer(float x, int64_t number) {
    int at = found;
    while (at && value[at - 1] < x) at--;
    if (at == k) return;
    if (found < k) found++;
    for (int i = found - 1; i > at; i--) value[i] = value[i - 1], token[i] = token[i - 1];
    value[at] = x;
    token[at] = number;
  }

  float least() const { return found < k ? -std::numeric_limits<float>::infinity() : value[k - 1]; }

  // `count` logits, the first of which is number `first`; behind them there is room to the next multiple of GROUP.
  void see(float* x, int count, int64_t first, const int64_t* never, int nevers) {
    for (int j = count; j % GROUP; j++) x[j] = -std::numeric_limits<float>::infinity();
    Floats here = load(x);
    for (int j = LANES; j < count; j += LANES) here = larger(here, load(x + j));
    const float high = std::max(most, largest(here));
    Floats part[4] = {};
    for (int j = 0; j < count; j += GROUP) {
      Floats top = load(x + j);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const Floats v = load(x + j + i * LANES);
        part[i] += exp(v - high);
        top = larger(top, v);
      }
      if (!any(top > least())) continue;
      for (int i = j; i < std::min(j + GROUP, count); i++)
        if ((x[i] > least() || found < k) && std::find(never, never + nevers, first + i) == never + nevers)
          offer(x[i], first + i);
    }
    const float before = most == high ? sums : sums * std::exp(most - high);
    sums = before + sum((part[0] + part[1]) + (part[2] + part[3]));
    most = high;
  }
};

// The k most probable next tokens of hidden [rows, dim]: log-probabilities [rows, k], best first, and numbers.
inline void best(const Model& m, const float* hidden, int rows, int k, const int64_t* never, int nevers, float* values,
                 int64_t* tokens) {
  const int stride = SEEN, count = int(panels(m.output.out));
  static thread_local std::vector<float> logits;
  at_least(logits, int64_t(rows) * stride + GROUP);
  const Inputs inputs(hidden, rows, m.output.in, m.output.kind);
  std::vector<Best> found;
  for (int r = 0; r < rows; r++) found.push_back({values + int64_t(r) * k, tokens + int64_t(r) * k, k});
  for (int p = 0; p < count; p += stride / WIDE) {
    const int last = std::min(p + stride / WIDE, count), columns = std::min(last * WIDE, m.output.out) - p * WIDE;
    inputs.multiply(m.output, logits.data(), stride, WRITE, p, last);
    for (int r = 0; r < rows; r++)
      found[r].see(logits.data() + int64_t(r) * stride, columns, int64_t(p) * WIDE, never, nevers);
  }
  for (Best& each : found) {
    const float rest = std::log(each.sums);
    for (int i = 0; i < k; i++) {
      if (i >= each.found) each.value[i] = -std::numeric_limits<float>::infinity(), each.token[i] = 0;
      each.value[i] = (each.value[i] - each.most) - rest;  // in this order nothing is lost
    }
  }
}

// Logits [n] become log-probabilities, the very ones that `best` gives.
inline void normalise(float* logits, int64_t n) {
  float room[SEEN], value;
  int64_t token;
  Best all{&value, &token, 1};
  for (int64_t at = 0; at < n; at += SEEN) {
    const int count = int(std::min<int64_t>(SEEN, n - at));
    std::copy_n(logits + at, count, room);
    all.see(room, count, at, nullptr, 0);
  }
  const float rest = std::log(all.sums);
  for (int64_t i = 0; i < n; i++) logits[i] = (logits[i] - all.most) - rest;
}

inline int64_t bytes(const Matrix& w) { return int64_t(w.in) * w.out * size(w.kind); }

// Rows that go through the layers together. Weights that are large must serve many rows each time they are fetched;
// where they stay in the cache anyway, fewer rows leave more of it to keys and values.
inline int many(const Model& m) {
  int64_t all = bytes(m.output);
  for (int l = 0; l < m.decoder_layers; l++) {
    const Block& block = m.decoder[l];
    for (const Matrix* w : {&block.attention_in, &block.attention_out, &block.cross_query, &block.cross_out,
                            &block.inner, &block.gate, &block.outer})
      all += bytes(*w);
  }
  return int(std::min<int64_t>(256, std::max<int64_t>(48, all >> 16)));
}

}  // namespace weft
