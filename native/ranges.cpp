#include "ranges.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <vector>

#include "crew.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock {
namespace {

// A list of this many bytes does not stay in the cache, so that stores past it are faster: 1.1 to 2 times (32 KiB
// to 1 MiB blocks, AMD EPYC with 32 MiB L3), and what the cache holds of other work stays there. Where source and
// target were in the cache, the two are equally fast at 10 MiB.
constexpr std::uint64_t kStreamedBytes = 12U << 20U;
constexpr std::uint64_t kStreamedRangeBytes = 1024;
constexpr std::uint64_t kPieceBytes = 256U << 10U;  // waking a thread for less costs more than it brings
constexpr std::uint64_t kPieceBytesMax = 4U << 20U;  // 0.3 ms, and 10 ms where each page is touched for the first time
constexpr std::uint64_t kPiecesPerThread = 4;
constexpr std::size_t kVectorsMax = 1024;  // IOV_MAX of Linux

// Part of a list: `bytes` from `skip` bytes into range `first` on.
struct Piece {
    std::size_t first;
    std::uint64_t skip;
    std::uint64_t bytes;
};

std::uint64_t total_bytes(Column lengths) {
    return std::accumulate(lengths.begin(), lengths.end(), std::uint64_t{0});
}

// Cut a list into pieces of about equal size, within ranges too where `may_cut(range)`.
template <class MayCut>
std::vector<Piece> cut(Column lengths, std::size_t threads, MayCut may_cut) {
    const std::uint64_t total = total_bytes(lengths);
    const std::uint64_t share = total / (std::max<std::size_t>(threads, 1) * kPiecesPerThread) + 1;
    const std::uint64_t wanted = std::clamp(share, kPieceBytes, kPieceBytesMax);
    std::vector<Piece> pieces;
    Piece piece{0, 0, 0};
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        std::uint64_t taken = 0;
        while (may_cut(i) && lengths[i] - taken > wanted - piece.bytes) {
            taken += wanted - piece.bytes;
            piece.bytes = wanted;
            pieces.push_back(piece);
            piece = {i, taken, 0};
        }
        piece.bytes += lengths[i] - taken;
        if (piece.bytes >= wanted) {
            pieces.push_back(piece);
            piece = {i + 1, 0, 0};
        }
    }
    if (piece.bytes > 0) {
        pieces.push_back(piece);
    }
    return pieces;
}

#if defined(__x86_64__)

constexpr std::size_t kVectors = 8;
constexpr std::uint64_t kGroupBytes = kVectors * sizeof(__m256i);
constexpr std::uint64_t kPageBytes = 4096;

// Vectors of 32 bytes did better than of 64, which fill a line each but keep fewer of them in flight.
__attribute__((target("avx"), always_inline)) inline void stream_groups(std::byte*& target, const std::byte*& source,
                                                                        std::uint64_t bytes) {
    for (; bytes >= kGroupBytes; bytes -= kGroupBytes) {
        __m256i vectors[kVectors];
        for (__m256i& vector : vectors) {
            vector = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
            source += sizeof vector;
        }
        for (const __m256i& vector : vectors) {
            _mm256_stream_si256(reinterpret_cast<__m256i*>(target), vector);
            target += sizeof vector;
        }
    }
}

// memcpy with stores that go past the cache. Of each next page a line is asked for on both sides, so that it is
// looked up meanwhile; a page that is not there costs nothing.
__attribute__((target("avx"))) void stream(std::byte* target, const std::byte* source, std::uint64_t bytes) {
    constexpr std::uint64_t kLine = 64;
    const std::uint64_t head = -reinterpret_cast<std::uintptr_t>(target) % kLine;
    std::memcpy(target, source, head);
    target += head;
    source += head;
    bytes -= head;
    for (; bytes >= kPageBytes; bytes -= kPageBytes) {
        __builtin_prefetch(source + kPageBytes);
        __builtin_prefetch(target + kPageBytes, 1);
        stream_groups(target, source, kPageBytes);
    }
    stream_groups(target, source, bytes);
    bytes %= kGroupBytes;
    std::memcpy(target, source, bytes);
}

bool can_stream() {
    static const bool can = __builtin_cpu_supports("avx");
    return can;
}

void await_streamed() { _mm_sfence(); }

#else

void stream(std::byte* target, const std::byte* source, std::uint64_t bytes) { std::memcpy(target, source, bytes); }
bool can_stream() { return false; }
void await_streamed() {}

#endif

bool is_set(Stop stop) { return stop != nullptr && __atomic_load_n(stop, __ATOMIC_RELAXED) != 0; }

bool overlap(std::uint64_t target, std::uint64_t source, std::uint64_t bytes) {
    return target - source < bytes || source - target < bytes;
}

void copy_piece(Column targets, Column sources, Column lengths, Piece piece, bool streamed) {
    for (std::size_t i = piece.first; piece.bytes > 0; ++i) {
        const std::uint64_t bytes = std::min(lengths[i] - piece.skip, piece.bytes);
        auto* target = reinterpret_cast<std::byte*>(targets[i] + piece.skip);
        const auto* source = reinterpret_cast<const std::byte*>(sources[i] + piece.skip);
        if (i + 1 < lengths.size()) {  // its first pages are looked up meanwhile
            __builtin_prefetch(reinterpret_cast<const void*>(sources[i + 1]));
            __builtin_prefetch(reinterpret_cast<const void*>(targets[i + 1]), 1);
        }
        if (overlap(targets[i], sources[i], lengths[i])) {
            std::memmove(target, source, bytes);
        } else if (streamed && bytes >= kStreamedRangeBytes) {
            stream(target, source, bytes);
        } else {
            std::memcpy(target, source, bytes);
        }
        piece.bytes -= bytes;
        piece.skip = 0;
    }
    if (streamed) {
        await_streamed();
    }
}

// `process_vm_readv` or `process_vm_writev` of one piece, in batches.
Moved move_piece(Direction direction, int pid, Column local, Column remote, Column lengths, Piece piece) {
    std::array<iovec, kVectorsMax> here;
    std::array<iovec, kVectorsMax> there;
    std::uint64_t moved = 0;
    while (piece.bytes > 0) {
        std::size_t count = 0;
        std::uint64_t left = piece.bytes;
        for (std::uint64_t skip = piece.skip, i = piece.first; left > 0 && count < kVectorsMax; ++i, ++count) {
            const std::uint64_t bytes = std::min(lengths[i] - skip, left);
            here[count] = {reinterpret_cast<void*>(local[i] + skip), bytes};
            there[count] = {reinterpret_cast<void*>(remote[i] + skip), bytes};
            left -= bytes;
            skip = 0;
        }
        const ssize_t done = direction == Direction::kRead
                                 ? process_vm_readv(pid, here.data(), count, there.data(), count, 0)
                                 : process_vm_writev(pid, here.data(), count, there.data(), count, 0);
        if (done < 0) {
            if (errno == EINTR) {
                continue;
            }
            return {moved, errno};
        }
        if (done == 0) {
            return {moved, EFAULT};
        }
        moved += static_cast<std::uint64_t>(done);
        piece.bytes -= static_cast<std::uint64_t>(done);
        for (auto passed = static_cast<std::uint64_t>(done) + piece.skip;; passed -= lengths[piece.first++]) {
            piece.skip = passed;
            if (piece.bytes == 0 || passed < lengths[piece.first]) {
                break;
            }
        }
    }
    return {moved, 0};
}

}  // namespace

bool copy_ranges(Column targets, Column sources, Column lengths, std::size_t threads, Stop stop) {
    const std::uint64_t total = total_bytes(lengths);
    const bool streamed = total >= kStreamedBytes && can_stream();
    if (total <= kPieceBytes) {
        copy_piece(targets, sources, lengths, {0, 0, total}, streamed);
        return true;
    }
    const auto pieces =
        cut(lengths, threads, [&](std::size_t i) { return !overlap(targets[i], sources[i], lengths[i]); });
    std::atomic<bool> stopped{false};
    spread(threads, pieces.size(), [&](std::size_t part) {
        if (is_set(stop)) {
            stopped.store(true, std::memory_order_relaxed);
        } else {
            copy_piece(targets, sources, lengths, pieces[part], streamed);
        }
    });
    return !stopped.load();
}

Moved move_between_processes(Direction direction, int pid, Column local, Column remote, Column lengths,
                             std::size_t threads, Stop stop) {
    const std::uint64_t total = total_bytes(lengths);
    if (total <= kPieceBytes) {
        return move_piece(direction, pid, local, remote, lengths, {0, 0, total});
    }
    const auto pieces = cut(lengths, threads, [](std::size_t) { return true; });
    std::atomic<std::uint64_t> bytes{0};
    std::atomic<int> error{0};
    spread(threads, pieces.size(), [&](std::size_t part) {
        if (error.load(std::memory_order_relaxed) != 0) {
            return;
        }
        const Moved moved = is_set(stop) ? Moved{0, ECANCELED}
                                         : move_piece(direction, pid, local, remote, lengths, pieces[part]);
        bytes.fetch_add(moved.bytes, std::memory_order_relaxed);
        if (int none = 0; moved.error != 0) {
            error.compare_exchange_strong(none, moved.error);
        }
    });
    return {bytes.load(), error.load()};
}

std::ptrdiff_t first_outside(Column offsets, Column lengths, std::uint64_t size) {
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        if (lengths[i] > size || offsets[i] > size - lengths[i]) {
            return static_cast<std::ptrdiff_t>(i);
        }
    }
    return -1;
}

std::size_t coalesce(const Pairs& pairs, const MergedPairs& merged) {
    const bool by_region = !pairs.local_regions.empty();
    std::size_t count = 0;
    for (std::size_t i = 0; i < pairs.lengths.size(); ++i) {
        const std::uint64_t bytes = pairs.lengths[i];
        if (bytes == 0) {
            continue;
        }
        if (count > 0) {
            const std::size_t last = count - 1;
            const std::uint64_t joined = merged.lengths[last] + bytes;
            if (joined > bytes && pairs.local[i] - merged.local[last] == merged.lengths[last] &&
                pairs.remote[i] - merged.remote[last] == merged.lengths[last] &&
                (!by_region || (pairs.local_regions[i] == merged.local_regions[last] &&
                                pairs.remote_regions[i] == merged.remote_regions[last]))) {
                merged.lengths[last] = joined;
                continue;
            }
        }
        merged.local[count] = pairs.local[i];
        merged.remote[count] = pairs.remote[i];
        merged.lengths[count] = bytes;
        if (by_region) {
            merged.local_regions[count] = pairs.local_regions[i];
            merged.remote_regions[count] = pairs.remote_regions[i];
        }
        ++count;
    }
    return count;
}

}  // namespace penstock
