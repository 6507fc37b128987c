// A lock for many readers or one writer, under which writers do not starve.

#pragma once

#include <atomic>
#include <mutex>
#include <shared_mutex>

namespace penstock {

// `std::shared_mutex`, but new readers let a waiting writer go first. Meets the needs of std::unique_lock and
// std::shared_lock; neither side may lock twice.
class ReadersWriterLock {
  public:
    void lock() {
        ++waiting_writers_;
        {
            const std::scoped_lock turn(turn_);
            mutex_.lock();
        }
        --waiting_writers_;
    }
    bool try_lock() { return mutex_.try_lock(); }
    void unlock() { mutex_.unlock(); }

    void lock_shared() {
        if (waiting_writers_.load(std::memory_order_relaxed) > 0) {
            const std::scoped_lock turn(turn_);
            mutex_.lock_shared();
        } else {
            mutex_.lock_shared();
        }
    }
    bool try_lock_shared() {
        return waiting_writers_.load(std::memory_order_relaxed) == 0 && mutex_.try_lock_shared();
    }
    void unlock_shared() { mutex_.unlock_shared(); }

  private:
    std::shared_mutex mutex_;
    std::mutex turn_;
    std::atomic<int> waiting_writers_ = 0;
};

}  // namespace penstock
