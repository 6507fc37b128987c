// What one worker holds: the copies of each block by tier, and the block before it.
//
// The oracle is the Python twin in src/penstock/core/content.py: equal calls give equal content.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "flat_map.hpp"
#include "holders.hpp"
#include "radix.hpp"

namespace penstock {

// A map and nothing beside it, as nobody looks for prefixes here: a third of what an index of one worker takes.
class Content {
  public:
    std::size_t size() const { return blocks_.size(); }
    std::size_t unknown_removals() const { return unknown_removals_; }

    void store(HashView hashes, std::optional<std::uint64_t> parent, std::size_t tier);
    void remove(HashView hashes, std::size_t tier);
    void clear() { blocks_.clear(); }

    // All of it, parents before children.
    std::pair<std::vector<std::uint64_t>, std::vector<Run>> runs() const;

    // Raise std::logic_error where the state contradicts itself.
    void check() const;

  private:
    struct Block {
        std::optional<std::uint64_t> parent;
        Holding copies{std::uint32_t{0}}; // of worker 0
        bool vacant() const { return !copies.has_copies(); }
    };

    FlatMap<Block> blocks_;
    std::size_t unknown_removals_ = 0;
};

}  // namespace penstock
