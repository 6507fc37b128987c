// A request of a simulated engine, as its scheduler, queue and batch know it.

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "pool.hpp"

namespace penstock {

using Count = std::int64_t;

// Names a request's blocks, of its prompt and of what it will be answered.
class Names {
  public:
    virtual ~Names() = default;

    // Blocks `start` to `end`.
    virtual std::vector<Hash> between(Count start, Count end) const = 0;
};

struct JumpSequence {
    Count number; // counts arrivals
    Count known; // its tokens; while it decodes, those at tick `joined`, and one more each tick since
    Count num_prompt;
    Count end_tokens;
    Count told; // output tokens that went out
    bool kv_transfer; // its KV goes to another worker, which is told how far its prompt is
    std::vector<Hash> hashes; // of its leading blocks, as far as they were needed
    std::unique_ptr<const Names> names;
    BlockUse use; // what it uses its blocks for; its end comes `ttl_s` after the request's
    double ttl_s;
    Count computed = 0; // tokens whose KV is there, while its prompt is computed
    std::optional<Count> joined = {};
    std::vector<BlockId> blocks = {};
    std::vector<BlockId> windows = {}; // blocks of its sliding windows
    Count published = 0; // its leading blocks that are in the prefix cache
    std::optional<std::uint64_t> parent = {}; // low half of the last of those
    std::optional<Count> cached_tokens = {};
    bool is_fresh = true; // nothing was told yet
    bool is_aborted = false;
    std::optional<std::list<JumpSequence*>::iterator> place = {}; // while it waits
    Count since_tokens = 0; // prompt tokens that its engine had computed when it came
    bool is_held = false; // while it waits: it holds what is cached of it
    std::vector<BlockId> held = {}; // leading blocks, those that were loaded included
    std::vector<BlockId> targets = {}; // blocks after them, which are being loaded
    Count num_before = 0; // held blocks that were not loaded
    bool is_short = false; // its load has brought too few blocks: there is no second one while it waits
    Count num_taken = 0; // blocks that nothing else held when they were taken
    std::optional<double> turn_end = {}; // where its prompt ends on its tenant's clock; nothing where tenants take no turns
    std::optional<double> rank = {}; // among those that wait; nothing before it is known what it lacks

    Count num_held() const { return static_cast<Count>(held.size() + targets.size()); }
    Count lacking() const { return known - computed; }
    Count end_tick() const { return *joined + end_tokens - known; }

    // Have the names of the first blocks.
    void name(Count count) {
        const auto have = static_cast<Count>(hashes.size());
        if (count > have) {
            const auto more = names->between(have, count);
            hashes.insert(hashes.end(), more.begin(), more.end());
        }
    }
};

// So many tokens, or blocks, for a request.
struct Share {
    JumpSequence* sequence;
    Count amount;
};

inline void require(bool condition, const char* otherwise) {
    if (!condition) {
        throw Broken(otherwise);
    }
}

inline std::size_t at(Count index) { return static_cast<std::size_t>(index); }

template <class T>
Count size_of(const std::vector<T>& items) {
    return static_cast<Count>(items.size());
}

}  // namespace penstock
