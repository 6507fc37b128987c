// The CPU's instruction takes 3 cycles but starts each cycle: three parts of the input are summed side by side and
// joined afterwards. Joining asks what a sum becomes when so many zeros follow, which is linear in the sum's bits, so
// that a table for each of its bytes gives it.

#include "checksum.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <numeric>

#include "crew.hpp"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace penstock {
namespace {

static_assert(std::endian::native == std::endian::little, "words are summed as little-endian bytes");

constexpr std::uint32_t kPolynomial = 0x82f63b78;
constexpr std::size_t kBytesPerSum = 4;
constexpr std::size_t kValuesPerByte = 256;

using ByteTable = std::array<std::uint32_t, kValuesPerByte>;

// Row i: what a byte does to a sum when i zero bytes follow it.
template <std::size_t kRows>
constexpr std::array<ByteTable, kRows> tables_after_zeros() {
    std::array<ByteTable, kRows> rows{};
    for (std::uint32_t value = 0; value < kValuesPerByte; ++value) {
        std::uint32_t sum = value;
        for (int bit = 0; bit < 8; ++bit) {
            sum = (sum >> 1U) ^ ((sum & 1U) != 0 ? kPolynomial : 0);
        }
        rows[0][value] = sum;
    }
    for (std::size_t row = 1; row < kRows; ++row) {
        for (std::size_t value = 0; value < kValuesPerByte; ++value) {
            const std::uint32_t sum = rows[row - 1][value];
            rows[row][value] = (sum >> 8U) ^ rows[0][sum & 0xffU];
        }
    }
    return rows;
}

constexpr auto kAfterZeros = tables_after_zeros<8>();

std::uint64_t load(const std::byte* from) {
    std::uint64_t word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

std::uint32_t add_byte(std::uint32_t sum, std::byte byte) {
    return (sum >> 8U) ^ kAfterZeros[0][(sum ^ static_cast<std::uint32_t>(byte)) & 0xffU];
}

#if defined(__x86_64__)

// What a sum becomes when `kZeros` zero bytes follow.
template <std::size_t kZeros>
class Shift {
public:
    Shift() {
        std::array<std::uint32_t, 32> bits;
        for (std::size_t bit = 0; bit < bits.size(); ++bit) {
            std::uint32_t sum = std::uint32_t{1} << bit;
            for (std::size_t zero = 0; zero < kZeros; ++zero) {
                sum = add_byte(sum, std::byte{0});
            }
            bits[bit] = sum;
        }
        for (std::size_t byte = 0; byte < kBytesPerSum; ++byte) {
            for (std::size_t value = 1; value < kValuesPerByte; ++value) {
                const auto lowest = static_cast<std::size_t>(std::countr_zero(value));
                tables_[byte][value] = tables_[byte][value & (value - 1)] ^ bits[8 * byte + lowest];
            }
        }
    }

    std::uint32_t operator()(std::uint32_t sum) const {
        return tables_[0][sum & 0xffU] ^ tables_[1][sum >> 8U & 0xffU] ^ tables_[2][sum >> 16U & 0xffU] ^
               tables_[3][sum >> 24U];
    }

private:
    std::array<ByteTable, kBytesPerSum> tables_{};
};

// Sum three parts of `kPart` bytes at a time while there are so many, and pass them.
template <std::size_t kPart>
__attribute__((target("sse4.2"))) std::uint32_t sum_thirds(std::uint32_t sum, std::span<const std::byte>& bytes) {
    static const Shift<kPart> shift;
    const std::byte* at = bytes.data();
    std::size_t left = bytes.size();
    for (; left >= 3 * kPart; left -= 3 * kPart, at += 3 * kPart) {
        std::uint64_t first = sum;
        std::uint64_t second = 0;
        std::uint64_t third = 0;
        for (std::size_t i = 0; i < kPart; i += sizeof(std::uint64_t)) {
            first = _mm_crc32_u64(first, load(at + i));
            second = _mm_crc32_u64(second, load(at + kPart + i));
            third = _mm_crc32_u64(third, load(at + 2 * kPart + i));
        }
        sum = shift(shift(static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second)) ^
              static_cast<std::uint32_t>(third);
    }
    bytes = {at, left};
    return sum;
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(std::uint32_t crc, std::span<const std::byte> bytes) {
    std::uint32_t sum = ~crc;
    sum = sum_thirds<2048>(sum, bytes);
    sum = sum_thirds<128>(sum, bytes);
    std::uint64_t last = sum;
    while (bytes.size() >= sizeof last) {
        last = _mm_crc32_u64(last, load(bytes.data()));
        bytes = bytes.subspan(sizeof last);
    }
    sum = static_cast<std::uint32_t>(last);
    for (const std::byte byte : bytes) {
        sum = _mm_crc32_u8(sum, static_cast<unsigned char>(byte));
    }
    return ~sum;
}

Crc32c* fastest() { return __builtin_cpu_supports("sse4.2") ? crc32c_sse42 : crc32c_portable; }

#else

Crc32c* fastest() { return crc32c_portable; }

#endif

struct OneCopy {
    std::uint64_t target;
    std::uint64_t source;
    std::uint64_t bytes;
};

// `until_look` bytes are copied before it looks at `stop` again.
bool copy_one_summed(OneCopy copy, std::uint32_t& sum, std::uint64_t& until_look, Stop stop) {
    constexpr std::uint64_t kPieceBytes = 32U << 10U;  // stays in the nearest cache with its source
    constexpr std::uint64_t kLookBytes = 4U << 20U;
    auto* const target = reinterpret_cast<std::byte*>(copy.target);
    const auto* const source = reinterpret_cast<const std::byte*>(copy.source);
    const std::uint64_t distance = std::max(copy.target, copy.source) - std::min(copy.target, copy.source);
    const std::uint64_t piece = distance < copy.bytes ? copy.bytes : kPieceBytes;
    sum = 0;
    for (std::uint64_t at = 0; at < copy.bytes; at += piece) {
        if (until_look == 0) {
            if (stop != nullptr && __atomic_load_n(stop, __ATOMIC_RELAXED) != 0) {
                return false;
            }
            until_look = kLookBytes;
        }
        const std::uint64_t bytes = std::min(piece, copy.bytes - at);
        std::memmove(target + at, source + at, bytes);
        sum = crc32c(sum, {target + at, bytes});
        until_look -= std::min(bytes, until_look);
    }
    return true;
}

}  // namespace

std::uint32_t crc32c_portable(std::uint32_t crc, std::span<const std::byte> bytes) {
    std::uint32_t sum = ~crc;
    while (bytes.size() >= kAfterZeros.size()) {
        const std::uint64_t word = load(bytes.data()) ^ sum;
        sum = 0;
        for (std::size_t i = 0; i < kAfterZeros.size(); ++i) {
            sum ^= kAfterZeros[kAfterZeros.size() - 1 - i][word >> 8 * i & 0xffU];
        }
        bytes = bytes.subspan(kAfterZeros.size());
    }
    for (const std::byte byte : bytes) {
        sum = add_byte(sum, byte);
    }
    return ~sum;
}

std::uint32_t crc32c(std::uint32_t crc, std::span<const std::byte> bytes) {
    static Crc32c* const chosen = fastest();
    return chosen(crc, bytes);
}

bool copy_summed(Column targets, Column sources, Column lengths, std::uint32_t* sums, std::size_t threads, Stop stop) {
    constexpr std::uint64_t kShareBytes = 256U << 10U;  // waking a thread for less costs more than it brings
    const std::uint64_t total = std::accumulate(lengths.begin(), lengths.end(), std::uint64_t{0});
    const std::size_t parts = std::clamp<std::size_t>(total / kShareBytes, 1, std::max<std::size_t>(lengths.size(), 1));
    std::atomic<bool> stopped{false};
    spread(threads, parts, [&](std::size_t part) {
        std::uint64_t until_look = 0;
        const std::size_t end = (part + 1) * lengths.size() / parts;
        for (std::size_t i = part * lengths.size() / parts; i < end; ++i) {
            if (!copy_one_summed({targets[i], sources[i], lengths[i]}, sums[i], until_look, stop)) {
                stopped.store(true, std::memory_order_relaxed);
                return;
            }
        }
    });
    return !stopped.load();
}

}  // namespace penstock
