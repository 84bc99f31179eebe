// Memory to work in, which is kept for the next call.
#pragma once

#include <cstdint>
#include <vector>

namespace weft {

// Makes x that large, if it is not: what it has stays as it is, and is not filled again.
template <class T>
inline void at_least(std::vector<T>& x, int64_t size) {
  if (int64_t(x.size()) < size) x.resize(size);
}

constexpr int64_t ALIGNED = 16;       // floats: what several threads or the unit for blocks work on begins so
inline int64_t aligned(int64_t floats) { return (floats + ALIGNED - 1) / ALIGNED * ALIGNED; }

// Memory of this thread, from which calls take what they need and leave it; others use it while it waits for them.
class Workspace {
 public:
  float* take(int64_t floats) { return (at += aligned(floats)) - aligned(floats); }
  explicit Workspace(int64_t floats) {
    static thread_local std::vector<float> all;
    at_least(all, floats + ALIGNED);
    at = all.data() + (-(reinterpret_cast<uintptr_t>(all.data()) / sizeof(float)) & (ALIGNED - 1));
  }

 private:
  float* at;
};

}  // namespace weft
