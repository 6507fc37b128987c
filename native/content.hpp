// What one worker holds: the copies of each block by tier, and the block before it.
//
// The oracle is the Python reference in src/penstock/runtime/events/publisher.py: equal calls give equal content.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <memory>
#include <utility>
#include <vector>

#include "bucket_map.hpp"
#include "holders.hpp"
#include "radix.hpp"

namespace penstock {

// A block as one worker holds it.
struct ContentBlock {
    std::optional<std::uint64_t> parent;
    Holding copies{std::uint32_t{0}}; // of worker 0
    bool vacant() const { return !copies.has_copies(); }
};

// All that a worker held at one moment, told bit by bit however that changes meanwhile: parents before children, and
// chains in as few pieces as there are ends.
class ContentWalk {
  public:
    using Block = ContentBlock;

    explicit ContentWalk(BucketMap<Block> blocks);

    // Go on by so many steps, each of which looks at one block; gives what there is to tell by then.
    std::pair<std::vector<std::uint64_t>, std::vector<Run>> next(std::size_t steps);

    bool is_done() const { return pass_ == Pass::kDone && climbing_.second == nullptr && path_.empty(); }

  private:
    // Mark the parents; tell the blocks that have no children, and all above each; tell those whose parents go in a circle.
    enum class Pass { kMark, kEnds, kOthers, kDone };
    using Keyed = std::pair<std::uint64_t, const Block*>;

    std::size_t number(std::uint64_t key, const Block& block) const;
    void next_block();
    void climb();
    void say(std::vector<std::uint64_t>& hashes, std::vector<Run>& runs);

    const BucketMap<Block> blocks_;
    std::vector<std::size_t> offsets_; // of each flat map's slots among all
    std::vector<bool> has_child_;
    std::vector<bool> is_said_;
    Pass pass_ = Pass::kMark;
    std::size_t map_ = 0; // where the pass is
    std::size_t slot_ = 0;
    Keyed climbing_{0, nullptr};
    std::vector<Keyed> path_; // found and not told, the first one last
    Holding latest_{std::uint32_t{0}};
};

// A map and nothing beside it, as nobody looks for prefixes here: a third of what an index of one worker takes.
class Content {
  public:
    std::size_t size() const { return blocks_.size(); }
    std::size_t unknown_removals() const { return unknown_removals_; }

    void store(HashView hashes, std::optional<std::uint64_t> parent, std::size_t tier);
    void remove(HashView hashes, std::size_t tier);

    // Gives what was kept, so that its memory can be given back a part at a time.
    std::vector<std::shared_ptr<void>> clear();

    // Begin to tell what there is now.
    ContentWalk walk();

    // Raise std::logic_error where the state contradicts itself.
    void check() const;

  private:
    using Block = ContentBlock;

    BucketMap<Block> blocks_;
    std::size_t unknown_removals_ = 0;
};

}  // namespace penstock
