// A straightforward pool that evicts by `seconds`, for the fuzz target: it looks at every block for each victim.

#pragma once

#include <algorithm>
#include <list>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "eviction.hpp"

namespace penstock {

class PlainEviction {
  public:
    using Ids = std::vector<BlockId>;

    PlainEviction(std::size_t num_blocks, std::size_t block_size, PrefillPrice price, std::size_t tenant_blocks)
        : num_blocks_(num_blocks), block_size_(block_size), price_(price), tenant_blocks_(tenant_blocks),
          reuse_(num_blocks), ghosts_most_(4 * num_blocks) {}

    Ids match(const std::vector<Hash>& hashes) const {
        Ids found;
        for (const Hash hash : hashes) {
            const auto same = [&](const auto& entry) { return entry.second.is_cached && entry.second.hash == hash; };
            const auto entry = std::ranges::find_if(blocks_, same);
            if (entry == blocks_.end()) {
                break;
            }
            found.push_back(entry->first);
        }
        return found;
    }

    std::size_t num_available() const {
        const auto is_held = [](const auto& entry) { return entry.second.references > 0; };
        return num_blocks_ - static_cast<std::size_t>(std::ranges::count_if(blocks_, is_held));
    }

    void acquire(const Ids& ids) {
        for (const BlockId id : ids) {
            if (blocks_[id].references++ == 0) {
                blocks_[id].unused = now_ - blocks_[id].last;
                update_leaves();
            }
        }
    }

    // Evict what has to go for so many free blocks.
    void make_room(std::size_t count) {
        while (count <= num_available() && num_blocks_ - blocks_.size() < count) {
            evict(victim());
        }
    }

    // `ids` are what the pool has given.
    void allocate(const Ids& ids) {
        make_room(ids.size());
        for (const BlockId id : ids) {
            now_ += id >= num_taken_;
            num_taken_ = std::max(num_taken_, id + 1);
            blocks_[id] = Block{};
            blocks_[id].references = 1;
        }
    }

    void release(const Ids& ids, const std::optional<BlockUse>& use) {
        for (std::size_t at = ids.size(); at-- > 0;) {
            Block& block = blocks_[ids[at]];
            if (use && block.is_cached) {
                note_use(block, *use);
            }
            if (--block.references > 0) {
                continue;
            }
            if (block.is_cached) {
                update_leaves();
            } else {
                blocks_.erase(ids[at]);
            }
        }
    }

    void commit(const Ids& ids, const std::vector<Hash>& hashes, std::optional<std::uint64_t> parent) {
        for (std::size_t at = 0; at < ids.size(); ++at) {
            if (match({hashes[at]}).empty()) {
                Block& block = blocks_[ids[at]];
                block.hash = hashes[at];
                block.parent = at > 0 ? std::optional(hashes[at - 1].low) : parent;
                block.depth = 0;
                for (const auto& [id, other] : blocks_) {
                    if (other.is_cached && block.parent == other.hash.low) {
                        block.depth = other.depth + 1;
                    }
                }
                block.is_cached = true;
                block.last = now_;
                enter(block);
            }
        }
    }

    void forget(BlockId id) {
        blocks_[id].is_cached = false;
    }

    void reset() {
        std::erase_if(blocks_, [](const auto& entry) { return entry.second.references == 0; });
        for (auto& [id, block] : blocks_) {
            block.is_cached = false;
        }
        leaves_.clear();
        ghosts_.clear();
        next_ = 0;
    }

    void expire(double now_s, std::size_t most) {
        std::vector<std::pair<double, BlockId>> over;
        for (const auto& [id, block] : blocks_) {
            if (block.is_cached && block.until_s <= now_s) {
                over.emplace_back(block.until_s, id);
            }
        }
        std::ranges::sort(over);
        for (const auto& [until_s, id] : std::span(over).first(std::min(most, over.size()))) {
            blocks_[id].priority = 0;
            blocks_[id].until_s = kForever;
        }
    }

    void set_price(PrefillPrice price) { price_ = price; }

    std::size_t num_cached() const {
        return static_cast<std::size_t>(std::ranges::count_if(blocks_, [](const auto& entry) { return entry.second.is_cached; }));
    }

    bool contains(Hash hash) const { return !match({hash}).empty(); }

  private:
    static constexpr double kForever = std::numeric_limits<double>::infinity();

    struct Block {
        Hash hash{};
        std::optional<std::uint64_t> parent;
        bool is_cached = false;
        int references = 0;
        int depth = 0;
        std::uint64_t last = 0;
        std::uint64_t order = 0;
        std::uint64_t unused = 0;
        double until_s = kForever;
        std::uint32_t uses = 0;
        std::size_t segment = 0;  // class of the reuse table
        int priority = 0;
        std::size_t watched = 0;
        std::uint64_t tenant = 0;
    };

    static bool is_idle(const Block& block) { return block.is_cached && block.references == 0; }

    bool is_leaf(const Block& block) const {
        return is_idle(block) && std::ranges::none_of(blocks_, [&](const auto& entry) {
                   return is_idle(entry.second) && entry.second.parent == block.hash.low;
               });
    }

    // ---- idle blocks; `leaves_` are in the order in which they became leaves, or were looked at for their tenant

    void update_leaves() {
        leaves_.remove_if([&](BlockId id) { return !blocks_.contains(id) || !is_leaf(blocks_[id]); });
        for (auto& [id, block] : blocks_) {
            if (is_leaf(block) && std::ranges::find(leaves_, id) == leaves_.end()) {
                leaves_.push_back(id);
                first_order(block);
            }
        }
    }

    void first_order(Block& block) {
        if (block.order == 0) {  // no request used it
            block.order = ++order_;
        }
    }

    void evict(BlockId id) {
        const Block block = blocks_[id];
        blocks_.erase(id);
        update_leaves();
        ++now_;
        note_gone(block);
    }

    // ---- which leaf goes

    BlockId victim() {
        if (const auto id = victim_of_tenant()) {
            return *id;
        }
        int lowest = 8;
        for (const BlockId id : leaves_) {
            lowest = std::min(lowest, blocks_[id].priority);
        }
        Ids ids;
        std::ranges::copy_if(leaves_, std::back_inserter(ids), [&](BlockId id) { return blocks_[id].priority == lowest; });
        return least(heads(ids));
    }

    std::optional<BlockId> victim_of_tenant() {
        std::map<std::uint64_t, std::size_t> counts;
        for (const auto& [id, block] : blocks_) {
            counts[block.tenant] += is_idle(block) && block.tenant != 0;
        }
        std::size_t most = tenant_blocks_;
        std::uint64_t tenant = 0;
        for (const auto& [each, count] : counts) {  // ascending: of equal ones the first
            if (count > most) {
                most = count;
                tenant = each;
            }
        }
        if (tenant == 0) {
            return std::nullopt;
        }
        Ids sample;
        for (const BlockId id : leaves_) {
            if (blocks_[id].tenant == tenant && sample.size() < 32) {
                sample.push_back(id);
            }
        }
        for (const BlockId id : sample) {
            leaves_.remove(id);
            leaves_.push_back(id);
        }
        return sample.empty() ? std::nullopt : std::optional(least(sample));
    }

    double key_of(const Block& block) const {
        const double before = static_cast<double>(block.depth) * static_cast<double>(block_size_);
        const double weight = std::min(price_.load_s, price_.token_s + price_.deeper_s * before * 0.5);
        return reuse_.index(block.segment, now_ - block.last) * weight;
    }

    BlockId least(const Ids& ids) {
        return *std::ranges::min_element(ids, {}, [&](BlockId id) {
            return std::tuple(blocks_[id].priority, key_of(blocks_[id]), blocks_[id].order);
        });
    }

    Ids heads(const Ids& ids) {
        std::map<std::size_t, BlockId> heads;
        for (const BlockId id : ids) {
            const auto [entry, is_new] = heads.emplace(blocks_[id].segment, id);
            if (!is_new && blocks_[id].order < blocks_[entry->second].order) {
                entry->second = id;
            }
        }
        Ids found;
        for (const auto& [segment, id] : heads) {
            found.push_back(id);
        }
        return found;
    }

    // ---- what blocks go through

    std::size_t class_of(const Block& block, std::size_t kind) const {
        return ReuseTable::class_of(block.uses, static_cast<std::uint64_t>(block.depth) * block_size_, kind);
    }

    void enter(Block& block) {
        const auto ghost = take_ghost(block.hash);
        block.segment = class_of(block, 0);
        if (ghost) {
            block.segment = ghost->segment;
            block.uses = ghost->uses;
            block.last = ghost->last;
            block.watched = ghost->watched;
            block.unused = now_ - ghost->last;
        }
    }

    void note_use(Block& block, const BlockUse& use) {
        block.tenant = use.tenant;
        if (block.uses > 0) {
            reuse_.add(block.segment, block.watched, block.unused, true);
        }
        block.order = ++order_;
        ++block.uses;
        block.unused = block.watched = 0;
        block.last = now_;
        block.segment = class_of(block, use.kind);
        if (use.priority >= block.priority || block.until_s == kForever) {
            block.priority = use.priority;
            block.until_s = use.until_s;
        }
    }

    void note_gone(const Block& block) {
        if (block.uses > 0) {
            Block ghost = block;
            ghost.watched = reuse_.add(block.segment, block.watched, now_ - block.last, false);
            if (const auto dropped = put_ghost(ghost)) {
                reuse_.add(dropped->segment, dropped->watched, now_ - dropped->last, false);
            }
        }
    }

    // ---- ghosts: a ring, in which one that was taken keeps its place

    std::optional<Block> put_ghost(const Block& block) {
        if (ghosts_.size() < ghosts_most_) {
            next_ = ghosts_.size();
            ghosts_.emplace_back();
        }
        const auto dropped = std::exchange(ghosts_[next_], block);
        next_ = (next_ + 1) % ghosts_most_;
        return dropped;
    }

    std::optional<Block> take_ghost(Hash hash) {
        for (std::optional<Block>& ghost : ghosts_) {
            if (ghost && ghost->hash == hash) {
                return std::exchange(ghost, std::nullopt);
            }
        }
        return std::nullopt;
    }

    std::size_t num_blocks_;
    std::size_t block_size_;
    PrefillPrice price_;
    std::size_t tenant_blocks_;
    ReuseTable reuse_;
    std::size_t ghosts_most_;
    std::map<BlockId, Block> blocks_;  // all but the free ones
    std::list<BlockId> leaves_;
    std::vector<std::optional<Block>> ghosts_;
    std::size_t next_ = 0;
    std::uint64_t now_ = 0;  // blocks evicted, or taken for the first time
    BlockId num_taken_ = 0;  // ever
    std::uint64_t order_ = 0;
};

}  // namespace penstock
