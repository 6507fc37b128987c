#include "derived.hpp"

namespace penstock {
namespace {

constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15;
constexpr std::uint64_t kOtherHalf = 0xd1b54a32d192ed03;

// SplitMix64's finaliser.
std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

}  // namespace

void derived_hashes(const Stream& stream, std::uint64_t block_size, std::uint64_t start, std::span<Hash> out) {
    std::uint64_t end = start * block_size;  // of a block, in tokens
    for (Hash& hash : out) {
        end += block_size;
        const std::uint64_t unit = (end - 1) / stream.unit_tokens;
        const std::uint64_t name =
            unit < stream.shared.size() ? stream.shared[unit] : mix(stream.own + unit * kGolden);
        hash.low = mix(mix(name) + end);
        hash.high = mix(hash.low ^ name * kOtherHalf);
    }
}

}  // namespace penstock
