#include "cheapest.hpp"

#include <cmath>
#include <limits>
#include <vector>

namespace penstock {
namespace {

// SplitMix64's finaliser; Steele, Lea and Flood, 2014.
std::uint64_t mix(std::uint64_t value) {
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
    value = (value ^ value >> 27) * 0x94d049bb133111eb;
    return value ^ value >> 31;
}

}  // namespace

std::size_t cheapest(std::span<const double> terms, std::span<const bool> eligible, std::uint64_t request_hash) {
    const std::size_t slots = eligible.size();
    double least = std::numeric_limits<double>::infinity();
    std::vector<std::size_t> ties;
    for (std::size_t slot = 0; slot < slots; ++slot) {
        if (!eligible[slot]) {
            continue;
        }
        double price = terms[slot];
        for (std::size_t at = slot + slots; at < terms.size(); at += slots) {
            price += terms[at];
        }
        if (std::isnan(price)) {
            return slot;
        }
        if (price < least) {
            least = price;
            ties.clear();
        }
        if (price == least) {
            ties.push_back(slot);
        }
    }
    return ties.empty() ? 0 : ties[mix(request_hash) % ties.size()];
}

}  // namespace penstock
