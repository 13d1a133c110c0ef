// Work on several threads of torch's OpenMP pool: contiguous shares, a spinning barrier.
#pragma once
#include "simd.h"
#include <omp.h>
#include <sched.h>

namespace ATB_ISA {

// body(thread, count) on `threads` threads; with one there is no parallel region, which a forked worker
// needs: the pool of its parent does not exist there.
template <class Body> ATB_INLINE void on_threads(int threads, const Body &body) {
  if (threads <= 1) {
    body(0, 1);
    return;
  }
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num(), omp_get_num_threads());
}

struct Range {
  int64_t begin, end;
};

ATB_INLINE Range share(int64_t n, int thread, int count) {
  const int64_t each = n / count, extra = n % count;
  const int64_t begin = thread * each + min64(thread, extra);
  return {begin, begin + each + (thread < extra)};
}

// Elements touched below which one thread is faster than waking another.
constexpr int64_t SHARED_WORK = 16384;

// body(item) for n items in contiguous shares.
template <class Body> ATB_INLINE void share_items(int threads, int64_t n, int64_t work, const Body &body) {
  const int used = work < SHARED_WORK ? 1 : (int)min64(threads, n);
  on_threads(used, [&](int thread, int count) {
    const Range mine = share(n, thread, count);
    for (int64_t i = mine.begin; i < mine.end; ++i) body(i);
  });
}

// Items of unequal cost: threads take the next one as they come free. Results do not depend on who takes
// what.
template <class Body> ATB_INLINE void take_items(int threads, int64_t n, const Body &body) {
  const int used = (int)min64(threads, n);
  if (used <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i, 0);
    return;
  }
  int64_t next = 0;
#pragma omp parallel num_threads(used)
  {
    const int thread = omp_get_thread_num();
    for (;;) {
      const int64_t i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (i >= n) break;
      body(i, thread);
    }
  }
}

// A counting barrier in shared memory: spins, because a phase of one layer lasts microseconds, and yields
// when the other threads are evidently not running.
struct Barrier {
  int arrived = 0, phase = 0;

  void wait(int count) {
    if (count <= 1) return;
    const int seen = __atomic_load_n(&phase, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == count) {
      __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&phase, seen + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int spins = 0; __atomic_load_n(&phase, __ATOMIC_ACQUIRE) == seen; ++spins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      if (spins > 20000) sched_yield();
    }
  }
};

} // namespace ATB_ISA
