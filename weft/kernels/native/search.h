// Greedy and beam search over many sources: weft/decoding/greedy.py and beam.py where nothing is forced, forbidden by
// what came before, watched or recorded. The same decisions on the same numbers, in double precision as there.
//
// Each thread has a tile of rows and fills it up with new sources whenever others have ended.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>

#include "threads.h"
#include "transformer.h"

namespace weft {

struct Wanted {
  double length_penalty, finished;  // α; how many finished hypotheses are enough
  const int64_t* never;             // tokens that are never chosen
  const int64_t* ends;              // tokens that end a hypothesis
  int32_t nevers, count_ends, beam, n_best, min_len, greedy;
};

struct Sources {
  const int64_t* tokens;  // of all sources, one behind the other
  const int64_t* starts;  // [S + 1]
  const int64_t* limits;  // [S] the greatest length of a target
  const int64_t* first;   // [S] what the decoder reads first
  int32_t count, room;    // S; tokens that a found hypothesis has room for, its end included
};

// Of source s, n_best hypotheses one behind the other: tokens and log p [S, n_best, room], and of each
struct Found {
  int64_t* tokens;
  float* gained;
  double* score;  // [S, n_best]
  double* log_prob;
  int32_t* length;  // −1 where there is none; tokens without the end
  int32_t* finished;
};

// A hypothesis: its tokens, log p of each, and the slots of what the decoder has read on the way.
struct Hypothesis {
  std::vector<int64_t> tokens;
  std::vector<float> gained;
  double total = 0.0, score = 0.0;
  bool finished = false;
  std::vector<int32_t> path;
};

// Slots for keys and values; one is free again when no path goes through it.
class Store {
 public:
  Store(const Model& m) : layers_(m.decoder_layers), size_(2 * m.kv_heads * m.head_dim) {}

  int32_t take() {
    if (free_.empty()) grow();
    const int32_t slot = free_.back();
    free_.pop_back();
    users_[slot] = 1;
    return slot;
  }
  void keep(const std::vector<int32_t>& path) {
    for (int32_t slot : path) users_[slot]++;
  }
  void leave(const std::vector<int32_t>& path) {
    for (int32_t slot : path)
      if (!--users_[slot]) free_.push_back(slot);
  }
  float* entries() { return entries_.get(); }
  int64_t count() const { return int64_t(users_.size()); }

 private:
  void grow() {
    const int64_t before = count(), after = std::max<int64_t>(256, 2 * before);
    std::unique_ptr<float[]> larger(new float[layers_ * after * size_]);
    for (int64_t l = 0; l < layers_ && before; l++)
      std::copy_n(entries_.get() + l * before * size_, before * size_, larger.get() + l * after * size_);
    entries_ = std::move(larger);
    users_.resize(after, 0);
    for (int64_t slot = after - 1; slot >= before; slot--) free_.push_back(int32_t(slot));
  }

  int64_t layers_, size_;
  std::unique_ptr<float[]> entries_;
  std::vector<int32_t> users_, free_;
};

// A source on its way: its live hypotheses, all of one length, and those that are finished, best first.
struct Active {
  int source;
  Memory memory;
  std::shared_ptr<float[]> owner;  // of the memory, shared with the sources that were encoded beside it
  std::vector<Hypothesis> rows, kept;
  int completed = 0;
};

class Searcher {
 public:
  Searcher(const Model& m, const Wanted& wanted, const Sources& sources) : m_(m), w_(wanted), s_(sources), store_(m) {}

  int sources() const { return int(active_.size()); }

  // Sources [begin, end) begin.
  void begin(int begin, int end) {
    if (begin >= end) return;
    const int64_t kv = 2 * m_.kv_heads * m_.head_dim, tokens = s_.starts[end] - s_.starts[begin];
    std::shared_ptr<float[]> memory(new float[m_.decoder_layers * tokens * kv]);
    for (int from = begin, to; from < end; from = to) {  // so many at a time that what is on the way stays in the cache
      for (to = from + 1; to < end && s_.starts[to + 1] - s_.starts[from] <= many(m_);) to++;
      encode(m_, s_.tokens, s_.starts, from, to, memory.get() + (s_.starts[from] - s_.starts[begin]) * kv, tokens * kv);
    }
    for (int s = begin; s < end; s++) {
      const int64_t from = s_.starts[s] - s_.starts[begin];
      active_.push_back({s, {memory.get() + from * kv, tokens * kv, s_.starts[s + 1] - s_.starts[s]}, memory, {}, {}});
      active_.back().rows.resize(1);
    }
  }

  // One token for every row; false if the logits are no numbers.
  bool go_on(Found* found) {
    int count = 0;
    for (const Active& active : active_) count += int(active.rows.size());
    std::vector<int64_t> tokens, lengths;
    std::vector<Memory> memory;
    int64_t width = 0;
    for (Active& active : active_)
      for (Hypothesis& row : active.rows) {
        tokens.push_back(row.tokens.empty() ? s_.first[active.source] : row.tokens.back());
        lengths.push_back(int64_t(row.path.size()));
        row.path.push_back(store_.take());
        memory.push_back(active.memory);
        width = std::max(width, int64_t(row.path.size()));
      }
    std::vector<int32_t> slots(count * width);
    int at = 0;
    for (const Active& active : active_)
      for (const Hypothesis& row : active.rows)
        std::copy(row.path.begin(), row.path.end(), slots.begin() + at++ * width);
    std::vector<float> hidden(int64_t(count) * m_.dim);
    step(m_,
         {tokens.data(), lengths.data(), memory.data(), slots.data(), store_.entries(), store_.count(), int32_t(width),
          1},
         0, count, hidden.data());

    k_ = std::min(w_.greedy ? 1 : 2 * w_.beam, m_.output.out);
    gain_.resize(int64_t(count) * k_);
    token_.resize(int64_t(count) * k_);
    std::vector<int64_t> closed(w_.never, w_.never + w_.nevers);
    at = 0;
    for (size_t i = 0; i < active_.size();) {  // rows before min_len may not end; the others may
      const bool early = int(active_[i].rows[0].tokens.size()) < w_.min_len;
      int some = 0;
      for (; i < active_.size() && (int(active_[i].rows[0].tokens.size()) < w_.min_len) == early; i++)
        some += int(active_[i].rows.size());
      closed.resize(w_.nevers);
      if (early) closed.insert(closed.end(), w_.ends, w_.ends + w_.count_ends);
      best(m_, hidden.data() + int64_t(at) * m_.dim, some, k_, closed.data(), int(closed.size()),
           gain_.data() + int64_t(at) * k_, token_.data() + int64_t(at) * k_);
      at += some;
    }
    at = 0;
    std::vector<Active> going;
    for (Active& active : active_) {
      const int own = int(active.rows.size());
      for (int r = at; r < at + own; r++)
        if (std::isnan(gain_[int64_t(r) * k_])) return false;
      if (w_.greedy ? follow(active, at) : extend(active, at))
        going.push_back(std::move(active));
      else
        report(active, found);
      at += own;
    }
    active_ = std::move(going);
    return true;
  }

 private:
  static constexpr double NEVER = -std::numeric_limits<double>::infinity();

  bool ends(int64_t token) const {
    return std::find(w_.ends, w_.ends + w_.count_ends, token) != w_.ends + w_.count_ends;
  }
  double rank(double log_prob, double length) const { return log_prob / std::pow(length, w_.length_penalty); }

  // As greedy.follow: whether the one path of a source, whose next token is number `at`, goes on.
  bool follow(Active& active, int at) {
    Hypothesis& row = active.rows[0];
    const float gain = gain_[at];
    const bool possible = gain > -std::numeric_limits<float>::infinity();
    row.finished = possible && ends(token_[at]);
    const bool goes = !row.finished && possible && int64_t(row.tokens.size()) < s_.limits[active.source];
    if (row.finished || goes) row.gained.push_back(gain);
    if (goes) row.tokens.push_back(token_[at]);
    if (goes) return true;
    store_.leave(row.path);
    active.kept.push_back(std::move(row));
    return false;
  }

  // As beam's extend: whether a source, whose rows are number `at` and following, goes on.
  bool extend(Active& active, int at) {
    struct Candidate {
      double total;
      int row, c;
    };
    const int width = w_.beam, live = int(active.rows.size());
    const int length = int(active.rows[0].tokens.size());
    std::vector<Candidate> all;
    for (int r = 0; r < live; r++)
      for (int c = 0; c < k_; c++)
        all.push_back({active.rows[r].total + double(gain_[int64_t(at + r) * k_ + c]), r, c});
    const size_t few = std::min(all.size(), size_t(2 * width));
    std::partial_sort(all.begin(), all.begin() + few, all.end(), [](const Candidate& a, const Candidate& b) {
      return a.total != b.total ? a.total > b.total : a.row != b.row ? a.row < b.row : a.c < b.c;
    });
    all.resize(few);
    std::vector<Candidate> goes;
    for (size_t i = 0; i < all.size() && all[i].total > NEVER; i++) {
      const int64_t place = int64_t(at + all[i].row) * k_ + all[i].c;
      if (!ends(token_[place])) {
        if (int(goes.size()) < width) goes.push_back(all[i]);
      } else if (int(i) < width) {
        const double score = rank(all[i].total, length + 1);
        active.completed++;
        keep(active, active.rows[all[i].row], score, all[i].total, gain_[place]);
      }
    }
    const bool stuck = length == s_.limits[active.source] || goes.empty();
    if (stuck) cut_off(active);
    if (stuck || enough(active, goes[0].total, length + 1)) {
      for (const Hypothesis& row : active.rows) store_.leave(row.path);
      return false;
    }
    std::vector<Hypothesis> next;
    for (const Candidate& candidate : goes) {
      const int64_t place = int64_t(at + candidate.row) * k_ + candidate.c;
      next.push_back(active.rows[candidate.row]);
      next.back().tokens.push_back(token_[place]);
      next.back().gained.push_back(gain_[place]);
      next.back().total = candidate.total;
      store_.keep(next.back().path);
    }
    for (const Hypothesis& row : active.rows) store_.leave(row.path);
    active.rows = std::move(next);
    return true;
  }

  void keep(Active& active, const Hypothesis& row, double score, double total, float gain) {
    std::vector<Hypothesis>& kept = active.kept;
    if (int(kept.size()) == w_.n_best && !(score > kept.back().score)) return;
    Hypothesis done = row;
    done.gained.push_back(gain);
    done.score = score, done.total = total, done.finished = true;
    const auto behind =
        std::upper_bound(kept.begin(), kept.end(), score, [](double s, const Hypothesis& h) { return s > h.score; });
    kept.insert(behind, std::move(done));
    if (int(kept.size()) > w_.n_best) kept.pop_back();
  }

  void cut_off(Active& active) {
    std::vector<Hypothesis> cut;
    for (const Hypothesis& row : active.rows) {
      const auto same = [&](const Hypothesis& h) { return h.tokens == row.tokens; };
      if (std::any_of(active.kept.begin(), active.kept.end(), same)) continue;
      cut.push_back(row);
      cut.back().score = rank(row.total, std::max<double>(double(row.tokens.size()), 1.0));
    }
    std::stable_sort(cut.begin(), cut.end(),
                     [](const Hypothesis& a, const Hypothesis& b) { return a.score > b.score; });
    for (Hypothesis& row : cut)
      if (int(active.kept.size()) < w_.n_best) active.kept.push_back(std::move(row));
  }

  bool enough(const Active& active, double best_total, int length) const {
    const double longest = w_.length_penalty >= 0.0 ? double(s_.limits[active.source] + 1) : double(length + 1);
    const double possible = rank(best_total, longest) * (1.0 - 1e-12);
    const double worst = int(active.kept.size()) == w_.n_best ? active.kept.back().score : NEVER;
    return possible <= worst || double(active.completed) >= w_.finished;
  }

  void report(const Active& active, Found* found) const {
    for (int n = 0; n < w_.n_best; n++) {
      const int64_t at = int64_t(active.source) * w_.n_best + n;
      found->length[at] = -1;
      if (n >= int(active.kept.size())) continue;
      const Hypothesis& h = active.kept[n];
      std::copy(h.tokens.begin(), h.tokens.end(), found->tokens + at * s_.room);
      std::copy(h.gained.begin(), h.gained.end(), found->gained + at * s_.room);
      found->score[at] = h.score;
      found->log_prob[at] = h.total;
      found->length[at] = int32_t(h.tokens.size());
      found->finished[at] = h.finished;
    }
  }

  const Model& m_;
  const Wanted& w_;
  const Sources& s_;
  Store store_;
  std::vector<Active> active_;
  std::vector<float> gain_;
  std::vector<int64_t> token_;
  int k_ = 1;
};

enum Outcome { DONE, NO_NUMBERS, STOPPED, NO_MEMORY };

// All sources, which should stand in the order of their lengths. `stop` is asked now and then by the calling thread.
inline int search(const Model& m, const Wanted& wanted, const Sources& sources, Found* found, int32_t (*stop)(),
                  int threads) {
  const int wide = std::max(1, wanted.greedy ? 1 : wanted.beam),
            tile = std::max(1, many(m) / wide);  // sources of a tile
  const int workers = std::max(1, std::min(threads, sources.count / 4));
  const int share = std::max(1, std::min(tile, (sources.count + workers - 1) / workers));
  std::atomic<int> next{0}, outcome{DONE}, busy{workers - 1};
  const auto work = [&](int worker) {
    Searcher searcher(m, wanted, sources);
    while (outcome == DONE) {
      const int live = searcher.sources(), missing = share - live;
      if (!live || missing >= (share + 3) / 4) {
        const int begin = std::min(next.fetch_add(missing), sources.count);
        searcher.begin(begin, std::min(begin + missing, sources.count));
        if (!live && begin == sources.count) return;
      }
      if (!searcher.go_on(found)) outcome = NO_NUMBERS;
      if (worker == 0 && stop()) outcome = STOPPED;
    }
  };
  std::mutex lock;
  std::condition_variable ended;
  at_once(workers, [&](int worker) {
    try {
      work(worker);
    } catch (const std::bad_alloc&) {
      outcome = NO_MEMORY;
    }
    std::unique_lock<std::mutex> held(lock);
    if (worker) {
      busy--;
      ended.notify_one();
    } else {  // goes on asking while the others work
      while (!ended.wait_for(held, std::chrono::milliseconds(50), [&] { return busy == 0; }))
        if (outcome == DONE && stop()) outcome = STOPPED;
    }
  });
  return outcome;
}

}  // namespace weft
