// Work for several threads.
#pragma once

#include <thread>
#include <vector>

namespace weft {

// work(0), work(1), … at once; back when all are done.
template <class F>
void at_once(int workers, F work) {
  std::vector<std::thread> others;
  for (int worker = 1; worker < workers; worker++) others.emplace_back(work, worker);
  work(0);
  for (std::thread& other : others) other.join();
}

}  // namespace weft
