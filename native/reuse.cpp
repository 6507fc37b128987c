#include "reuse.hpp"

#include <algorithm>
#include <bit>

namespace penstock {
namespace {

// Counted blocks until a class's index is computed anew.
constexpr std::uint32_t kNew = 64;
// A class has the pooled rate until it saw more than about so many blocks of an age.
constexpr double kPrior = 20.0;
// Rate of reuse in an octave of age of which nothing is known.
constexpr double kUnknown = 0.05;
// What an epoch leaves of what was counted before.
constexpr double kKept = 0.8;
constexpr std::uint64_t kEpochMin = 8192;

double width_of(std::size_t age) { return age == 0 ? 1.0 : static_cast<double>(std::uint64_t{1} << (age - 1)); }

}  // namespace

ReuseTable::ReuseTable(std::size_t num_blocks) : classes_(kClasses), epoch_(std::max(kEpochMin, std::uint64_t{num_blocks} / 2)) {
    rebuild(0);
    std::ranges::fill(classes_, Class(classes_.front()));
}

std::size_t ReuseTable::class_of(std::uint32_t uses, std::uint64_t depth_tokens, std::size_t kind) {
    constexpr std::array<std::uint32_t, kUses - 1> most = {1, 2, 3, 4, 6, 9, 16};
    const auto by_uses = static_cast<std::size_t>(std::ranges::lower_bound(most, uses) - most.begin());
    const auto by_depth = std::min<std::size_t>(kDepths - 1, static_cast<std::size_t>(std::bit_width(depth_tokens >> 11)));
    return (by_uses * kDepths + by_depth) * kKinds + kind;
}

std::size_t ReuseTable::age_of(std::uint64_t evictions) {
    return std::min<std::size_t>(kAges - 1, static_cast<std::size_t>(std::bit_width(evictions)));
}

std::size_t ReuseTable::add(std::size_t cls, std::size_t watched, std::uint64_t evictions, bool is_reused) {
    const std::size_t age = age_of(evictions);
    for (Counts* counts : {&classes_[cls].counts, &pooled_[cls / (kDepths * kKinds)]}) {
        for (std::size_t each = watched; each <= age; ++each) {
            counts->watched[each] += 1.0;
        }
        counts->reused[age] += is_reused ? 1.0 : 0.0;
    }
    if (++num_events_ % epoch_ == 0) {
        forget();
    } else if (++classes_[cls].num_new >= kNew) {
        rebuild(cls);
    }
    return std::max(watched, age + 1);
}

void ReuseTable::rebuild(std::size_t cls) {
    Class& of = classes_[cls];
    const Counts& all = pooled_[cls / (kDepths * kKinds)];
    of.num_new = 0;
    Row rate{};
    for (std::size_t age = 0; age < kAges; ++age) {
        const double pooled = (all.reused[age] + kUnknown) / (all.watched[age] + 1.0);
        rate[age] = std::min(1.0, (of.counts.reused[age] + kPrior * pooled) / (of.counts.watched[age] + kPrior));
    }
    for (std::size_t age = 0; age < kAges; ++age) {
        double best = 0.0;
        double reused = 0.0;
        double stayed = 0.0;
        double left = 1.0;
        for (std::size_t end = age; end < kAges; ++end) {
            reused += left * rate[end];
            stayed += left * width_of(end) * (1.0 - rate[end] * 0.5);
            left *= 1.0 - rate[end];
            best = std::max(best, reused / stayed);
        }
        of.index[age] = best;
    }
}

void ReuseTable::forget() {
    const auto fade = [](Counts& counts) {
        for (std::size_t age = 0; age < kAges; ++age) {
            counts.reused[age] *= kKept;
            counts.watched[age] *= kKept;
        }
    };
    std::ranges::for_each(pooled_, fade);
    for (std::size_t cls = 0; cls < kClasses; ++cls) {
        fade(classes_[cls].counts);
        rebuild(cls);
    }
}

}  // namespace penstock
