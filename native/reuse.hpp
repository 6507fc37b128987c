// How likely blocks are used again, learned from what was: a table by class of block and time since its last use.
//
// Time is counted in evicted blocks, which is the time that matters to a cache, and until a pool is full in blocks taken
// for the first time, which would be evictions in a full one. The index of a class at an age is the most uses that a
// block can be expected to bring for each block-eviction that it stays from then on (Gittins): it sees that a chat comes
// back in a while, and does not give a block up just before.
//
// The oracle is src/penstock/kv/eviction.py: equal calls give equal numbers.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock {

class ReuseTable {
  public:
    static constexpr std::size_t kAges = 32;  // octaves
    static constexpr std::size_t kUses = 8;
    static constexpr std::size_t kDepths = 6;
    static constexpr std::size_t kKinds = 3;
    static constexpr std::size_t kClasses = kUses * kDepths * kKinds;

    explicit ReuseTable(std::size_t num_blocks);

    // Class of a block that was used so many times, starts at that token and is of that kind of use.
    static std::size_t class_of(std::uint32_t uses, std::uint64_t depth_tokens, std::size_t kind);

    static std::size_t age_of(std::uint64_t evictions);

    // A block of a class was used again after so many evictions, or was not until now. `watched` octaves of its age were
    // counted before; gives how many are now.
    std::size_t add(std::size_t cls, std::size_t watched, std::uint64_t evictions, bool is_reused);

    double index(std::size_t cls, std::uint64_t evictions) const { return classes_[cls].index[age_of(evictions)]; }

  private:
    using Row = std::array<double, kAges>;

    struct Counts {
        Row reused{};
        Row watched{};  // reached that age
    };

    struct Class {
        Counts counts;
        Row index{};
        std::uint32_t num_new = 0;
    };

    void rebuild(std::size_t cls);
    void forget();

    std::vector<Class> classes_;
    std::array<Counts, kUses> pooled_;  // over depths and kinds: what a class is taken for that saw little
    std::uint64_t epoch_;
    std::uint64_t num_events_ = 0;
};

}  // namespace penstock
