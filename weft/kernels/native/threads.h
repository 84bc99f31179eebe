// Work for several threads.
#pragma once

#include <atomic>
#include <new>
#include <thread>
#include <vector>

namespace weft {

// work(0), work(1), … at once, each in a thread of its own; back when all are done.
template <class F>
void at_once(int workers, F work) {
  std::vector<std::thread> others;
  for (int worker = 1; worker < workers; worker++) others.emplace_back(work, worker);
  work(0);
  for (std::thread& other : others) other.join();
}

// work(0), work(1), …, none of which may wait for another. OpenMP's threads are torch's own, where both have the same
// runtime: these go on spinning for a while when torch has no work for them, and would slow down any others.
template <class F>
void shared_out(int workers, F work) {
#ifdef _OPENMP
#pragma omp parallel for num_threads(workers) schedule(static, 1) if (workers > 1)
  for (int worker = 0; worker < workers; worker++) work(worker);
#else
  at_once(workers, work);
#endif
}

// work(worker) for all workers; what is thrown in their threads is thrown here.
template <class F>
inline void all_of(int workers, F work) {
  std::atomic<bool> failed{false};  // what is thrown must not leave its thread
  shared_out(workers, [&](int worker) {
    try {
      work(worker);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  });
  if (failed) throw std::bad_alloc();
}

}  // namespace weft
