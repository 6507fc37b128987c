#include "stream.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <limits>

namespace penstock {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kVectorsMax = 1024;  // IOV_MAX of Linux
// More than a socket's buffer takes at once, so that the kernel has enough and few vectors are listed twice.
constexpr std::uint64_t kCallBytes = 4U << 20U;

// What is left to move of a list.
class Rest {
public:
    Rest(Column addresses, Column lengths, std::uint64_t skip) : addresses_(addresses), lengths_(lengths) {
        pass(skip);
    }

    bool empty() const { return first_ == lengths_.size(); }

    std::size_t list(std::array<iovec, kVectorsMax>& vectors) const {
        std::size_t count = 0;
        std::uint64_t skip = skip_;
        std::uint64_t left = kCallBytes;
        for (std::size_t i = first_; i < lengths_.size() && left > 0 && count < kVectorsMax; ++i) {
            const std::uint64_t bytes = std::min(lengths_[i] - skip, left);
            vectors[count++] = {reinterpret_cast<void*>(addresses_[i] + skip), bytes};
            left -= bytes;
            skip = 0;
        }
        return count;
    }

    void pass(std::uint64_t bytes) {
        skip_ += bytes;
        while (first_ < lengths_.size() && skip_ >= lengths_[first_]) {
            skip_ -= lengths_[first_++];
        }
    }

private:
    Column addresses_;
    Column lengths_;
    std::size_t first_ = 0;
    std::uint64_t skip_ = 0;
};

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Rounded up, so that no wait ends before its time.
int as_milliseconds(double seconds) {
    const double most = std::numeric_limits<int>::max();
    return seconds * 1000 >= most ? -1 : static_cast<int>(std::ceil(std::max(seconds, 0.0) * 1000));
}

template <class Call>
Streamed move(int socket, short event, Rest rest, Patience patience, Call call) {
    std::array<iovec, kVectorsMax> vectors;
    const Clock::time_point start = Clock::now();
    Clock::time_point progress = start;
    bool waited = false;
    std::uint64_t moved = 0;
    while (!rest.empty()) {
        if (seconds_since(start) >= patience.deadline_s) {
            return {moved, StreamEnd::kDeadline, 0};
        }
        msghdr message{};
        message.msg_iov = vectors.data();
        message.msg_iovlen = rest.list(vectors);
        const ssize_t done = call(message);
        if (done > 0) {
            rest.pass(static_cast<std::uint64_t>(done));
            moved += static_cast<std::uint64_t>(done);
            waited = false;
            continue;
        }
        if (done == 0) {
            return {moved, StreamEnd::kClosed, 0};
        }
        if (errno == EINTR) {
            continue;
        }
        if (errno == EPIPE || errno == ECONNRESET) {
            return {moved, StreamEnd::kClosed, errno};
        }
        if (errno != EAGAIN && errno != EWOULDBLOCK) {
            return {moved, StreamEnd::kFailed, errno};
        }
        if (!waited) {
            waited = true;
            progress = Clock::now();
        }
        const double idle_left_s = patience.idle_s - seconds_since(progress);
        if (idle_left_s <= 0) {
            return {moved, StreamEnd::kIdle, 0};
        }
        const double deadline_left_s = patience.deadline_s - seconds_since(start);
        pollfd waiting{socket, event, 0};
        if (poll(&waiting, 1, as_milliseconds(std::min(idle_left_s, deadline_left_s))) < 0 && errno != EINTR) {
            return {moved, StreamEnd::kFailed, errno};
        }
    }
    return {moved, StreamEnd::kDone, 0};
}

}  // namespace

Streamed send_ranges(int socket, Column addresses, Column lengths, std::uint64_t skip, Patience patience) {
    return move(socket, POLLOUT, Rest(addresses, lengths, skip), patience,
                [&](const msghdr& message) { return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL); });
}

Streamed receive_ranges(int socket, Column addresses, Column lengths, std::uint64_t skip, Patience patience) {
    return move(socket, POLLIN, Rest(addresses, lengths, skip), patience,
                [&](msghdr& message) { return recvmsg(socket, &message, MSG_DONTWAIT); });
}

}  // namespace penstock
