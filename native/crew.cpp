#include "crew.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace penstock {
namespace {

struct Job {
    const std::function<void(std::size_t)>& work;
    std::size_t parts;
    std::atomic<std::size_t> next{0};
    std::size_t helpers = 0;  // at work on it now; guarded by the crew's mutex

    void run() {
        for (std::size_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
            work(part);
        }
    }
};

class Crew {
public:
    void run(Job& job, std::size_t helpers) {
        {
            const std::lock_guard lock(mutex_);
            hire(helpers);
            asked_.insert(asked_.end(), helpers, &job);
        }
        for (std::size_t i = 0; i < helpers; ++i) {
            wanted_.notify_one();
        }
        job.run();
        std::unique_lock lock(mutex_);
        std::erase(asked_, &job);
        left_.wait(lock, [&] { return job.helpers == 0; });
    }

private:
    // Where no thread can be started, the caller does the work with those there are.
    void hire(std::size_t helpers) {
        try {
            for (; hired_ < helpers; ++hired_) {
                std::thread([this] { serve(); }).detach();
            }
        } catch (const std::system_error&) {
        }
    }

    void serve() {
        std::unique_lock lock(mutex_);
        for (;;) {
            wanted_.wait(lock, [&] { return !asked_.empty(); });
            Job& job = *asked_.front();
            asked_.pop_front();
            ++job.helpers;
            lock.unlock();
            job.run();
            lock.lock();
            if (--job.helpers == 0) {
                left_.notify_all();
            }
        }
    }

    std::mutex mutex_;
    std::condition_variable wanted_;
    std::condition_variable left_;
    std::deque<Job*> asked_;  // one entry for each helper that a job still wants
    std::size_t hired_ = 0;
};

std::atomic<Crew*> current{nullptr};

// Never destroyed: its threads may be at work when the process ends. A forked child has none of them and perhaps a
// locked mutex, so it forgets its parent's.
Crew& crew() {
    static const int forked = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
    static_cast<void>(forked);
    Crew* found = current.load();
    if (found == nullptr) {
        auto* made = new Crew;
        if (current.compare_exchange_strong(found, made)) {
            return *made;
        }
        delete made;
    }
    return *found;
}

}  // namespace

void spread(std::size_t threads, std::size_t parts, const std::function<void(std::size_t)>& work) {
    const std::size_t used = std::min({threads, parts, kCrewMax});
    Job job{work, parts};
    if (used <= 1) {
        job.run();
    } else {
        crew().run(job, used - 1);
    }
}

}  // namespace penstock
