// The KV tiers below a simulated engine's device, as its scheduler needs them.

#pragma once

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "jump_sequence.hpp"

namespace penstock {

class JumpTiers {
  public:
    virtual ~JumpTiers() = default;

    // Count the blocks worth loading for a request of `known` tokens; `hits` are its leading blocks on the device, and
    // `ahead` is what the engine computes before it: (tokens, tokens before them).
    virtual Count find(std::span<const Hash> hashes, const std::vector<BlockId>& hits, Count known,
                       const std::vector<std::pair<Count, Count>>& ahead) = 0;

    // Start to load what `find` found last, and give the device's blocks for it. `prompt_tokens` are the request's
    // prompt tokens that the device lacks; nothing where its cached tokens were counted before.
    virtual std::vector<BlockId> load(Count number, std::optional<Count> prompt_tokens) = 0;

    // Start to load what `find` found last for a request that waits, and give the device's blocks for it.
    virtual std::vector<BlockId> prefetch(Count number) = 0;

    // Note that a request is admitted with what was prefetched for it; `prompt_tokens` as in `load`, before the prefetch.
    virtual void use_prefetch(Count number, std::optional<Count> prompt_tokens) = 0;

    // Cancel the prefetch of a request that waits.
    virtual void end_prefetch(Count number) = 0;

    // Cancel the load of a request, if there is one.
    virtual void cancel(Count number) = 0;

    // Keep the prefix of a request that leaves the batch; the device has all of its blocks.
    virtual void offload(std::span<const Hash> hashes) = 0;

    // The requests whose load ended since the last call, in order, each with the leading blocks that have come: they take the
    // place of those that `load` or `prefetch` gave.
    virtual std::vector<std::pair<Count, std::vector<BlockId>>> take_arrived() = 0;
};

}  // namespace penstock
