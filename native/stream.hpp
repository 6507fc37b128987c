// Ranges of memory sent into and received from a stream socket, straight from where they are to where they belong.
//
// The oracle is the Python reference in src/penstock/transfer/transports/tcp/streams.py.

#pragma once

#include <cstddef>
#include <cstdint>

#include "ranges.hpp"

namespace penstock {

enum class StreamEnd { kDone, kIdle, kDeadline, kClosed, kFailed };

struct Streamed {
    std::uint64_t bytes;  // of these ranges, `skip` not counted
    StreamEnd end;
    int error;  // an errno where `end` is kFailed
};

// How long to wait: for a byte to move, and for all of them. Infinite is for ever.
struct Patience {
    double idle_s;
    double deadline_s;
};

// Move what is left of a list after `skip` bytes. The socket may block or not; neither blocks past `patience`.
// `shutdown` of the socket by another thread ends the call.
Streamed send_ranges(int socket, Column addresses, Column lengths, std::uint64_t skip, Patience patience);
Streamed receive_ranges(int socket, Column addresses, Column lengths, std::uint64_t skip, Patience patience);

}  // namespace penstock
