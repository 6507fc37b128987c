// The KV tiers beneath a simulated engine's device, as its scheduler needs them.

#pragma once

#include <optional>
#include <span>
#include <vector>

#include "jump_sequence.hpp"

namespace penstock {

class JumpTiers {
  public:
    // Cached blocks that continue a prefix on the device; `on_device` are blocks after a gap that a lower tier fills.
    struct Found {
        std::vector<BlockId> on_device;
        Count num_blocks; // all of them
    };

    virtual ~JumpTiers() = default;

    // Keep in lower tiers what the device evicts for `count` new blocks. Called before each allocation.
    virtual void make_room(Count count) = 0;

    // Find blocks worth a fetch for a request of `known` tokens; `hits` are its leading blocks on the device.
    virtual Found find(std::span<const Hash> hashes, const std::vector<BlockId>& hits, Count known) = 0;

    // Start to fetch what `find` found last, and give the device's blocks for it. `prompt_tokens` are the request's
    // prompt tokens that the device lacks; nothing where its cached tokens were counted before.
    virtual std::vector<BlockId> fetch(Count number, std::optional<Count> prompt_tokens) = 0;

    // Drop the fetch of a request, if there is one.
    virtual void cancel(Count number) = 0;

    // The requests whose fetch ended since the last call, in order.
    virtual std::vector<Count> take_arrived() = 0;
};

}  // namespace penstock
