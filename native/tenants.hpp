// Counts idle blocks by the tenant whose request used them last, and keeps those that may go.
//
// The oracle is src/penstock/kv/reference_pool.py: equal calls give equal answers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "flat_map.hpp"
#include "hash_index.hpp"

namespace penstock {

class Tenants {
  public:
    // `most` idle blocks of each tenant.
    explicit Tenants(std::size_t most) : most_(most) {}

    // A held block is a tenant's from now on; 0 is nobody, who may have any number.
    void own(BlockId id, std::uint64_t tenant) { link(id).tenant = tenant; }

    // The block becomes idle, or is held again or goes.
    void enter_idle(BlockId id);
    void leave_idle(BlockId id);

    // The idle block may go, as the last of its tenant, or may not. It is none that may go when it is idle no more.
    void add_leaf(BlockId id);
    void remove_leaf(BlockId id);

    // The first block that may go of the tenant that has the most blocks past its share; nothing if nobody has any.
    std::optional<BlockId> first_over() const;

    // The next one of the same tenant.
    std::optional<BlockId> after(BlockId id) const;

    // Put the leaves of a tenant up to this one behind its others.
    void rotate(BlockId last);

    void reset();

    // Throws std::logic_error where lists and numbers contradict each other.
    void check(std::size_t num_idle, std::size_t num_leaves) const;

  private:
    static constexpr BlockId kNone = -1;

    struct Link {
        std::uint64_t tenant = 0;
        BlockId before = kNone;
        BlockId after = kNone;
    };

    struct List {
        BlockId first = kNone;
        BlockId last = kNone;
        std::uint32_t count = 0;  // of idle blocks, also those that may not go

        bool vacant() const { return count == 0; }
    };

    Link& link(BlockId id);

    std::size_t most_;
    std::vector<Link> links_;
    FlatMap<List> lists_;
    std::vector<std::uint64_t> over_;  // tenants with more than `most_`, in no order: at most one for each share
};

}  // namespace penstock
