// Where a request goes: the worker that is cheapest, and one of those that are equally cheap by the request's hash.
//
// The oracle is the Python reference in src/penstock/router/policies.py: equal input gives an equal slot.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace penstock {

// The slot with the least sum over `terms`, (rows, slots) one row after the other, of those `eligible`: there is one.
// A sum that is no number comes before all others, as it does in numpy.
std::size_t cheapest(std::span<const double> terms, std::span<const bool> eligible, std::uint64_t request_hash);

}  // namespace penstock
