#include "pool.hpp"

#include <algorithm>
#include <ranges>
#include <string>

namespace penstock {
namespace {

std::string name(BlockId id) { return "block " + std::to_string(id); }

// For checks; where speed counts, the text is only made when it is thrown.
void require(bool condition, const std::string& otherwise) {
    if (!condition) {
        throw Broken(otherwise);
    }
}

}  // namespace

Pool::Pool(std::size_t num_blocks, PolicyKind policy, std::size_t block_size, PrefillPrice price,
           std::size_t tenant_blocks)
    : num_blocks_(num_blocks) {
    if (policy != PolicyKind::kLru) {
        eviction_.emplace(num_blocks, block_size, price);
    }
    if (tenant_blocks < num_blocks) {
        tenants_.emplace(tenant_blocks);
    }
}

std::vector<BlockId> Pool::match(std::span<const Hash> hashes) const {
    std::vector<BlockId> found;
    found.reserve(hashes.size());
    for (const Hash hash : hashes) {
        const BlockId id = find(hash);
        if (id == kNone) {
            break;
        }
        found.push_back(id);
    }
    return found;
}

std::size_t Pool::count_idle(std::span<const BlockId> ids) const {
    return static_cast<std::size_t>(std::ranges::count_if(ids, [&](BlockId id) { return at(id).is_idle(); }));
}

void Pool::acquire(std::span<const BlockId> ids) {
    for (const BlockId id : ids) {
        Block& block = at(id);
        if (block.references == 0) {
            if (!block.is_cached) {
                throw Broken(name(id) + " is free: only what match found can be acquired");
            }
            unlink_idle(id);
        }
        ++block.references;
    }
}

std::vector<GivenUp> Pool::make_room(std::size_t count) {
    if (count > num_available() || count <= num_without_eviction()) {
        return {};
    }
    std::vector<BlockId> victims;
    evict(count - num_without_eviction(), &victims);
    return chains(std::move(victims));
}

// Of one sequence the first block goes last.
std::vector<GivenUp> Pool::chains(std::vector<BlockId> victims) const {
    std::vector<GivenUp> given_up;
    for (const BlockId id : std::views::reverse(victims)) {
        const Block& block = at(id);
        if (given_up.empty() || !block.has_parent || block.parent != given_up.back().hashes.back().low) {
            given_up.push_back({{}, {}, block.has_parent ? std::optional(block.parent) : std::nullopt});
        }
        given_up.back().ids.push_back(id);
        given_up.back().hashes.push_back(block.hash);
    }
    std::ranges::reverse(given_up);
    return given_up;
}

std::optional<std::vector<BlockId>> Pool::allocate(std::size_t count) {
    if (count > num_available()) {
        return std::nullopt;
    }
    if (count > num_without_eviction()) {
        evict(count - num_without_eviction());
    }
    std::vector<BlockId> ids(count);
    for (BlockId& id : ids) {
        if (free_.empty()) {
            id = static_cast<BlockId>(blocks_.size());
            blocks_.emplace_back();
            if (eviction_) {
                eviction_->first_taken();
            }
        } else {
            id = free_.back();
            free_.pop_back();
        }
        at(id).references = 1;
    }
    return ids;
}

void Pool::release(std::span<const BlockId> ids, const std::optional<BlockUse>& use) {
    for (std::size_t index = ids.size(); index-- > 0;) {
        const BlockId id = ids[index];
        Block& block = at(id);
        if (block.references == 0) {
            throw Broken(name(id) + " was released more often than it was taken");
        }
        if (use && block.is_cached) {
            if (eviction_) {
                eviction_->use(id, *use);
            }
            if (tenants_) {
                tenants_->own(id, use->tenant);
            }
        }
        if (--block.references == 0) {
            if (block.is_cached) {
                append_idle(id);
            } else {
                free_.push_back(id);
            }
        }
    }
}

void Pool::commit(std::span<const BlockId> ids, std::span<const Hash> hashes, std::optional<std::uint64_t> parent) {
    if (hashes.size() != ids.size()) {
        throw std::invalid_argument("commit: " + std::to_string(ids.size()) + " blocks need as many hashes, got " +
                                    std::to_string(hashes.size()));
    }
    std::size_t run_begin = 0;  // new blocks in a row are one change; resident ones end a run
    for (std::size_t index = 0; index < hashes.size(); ++index) {
        if (find(hashes[index]) != kNone) {
            tell_stored(hashes, run_begin, index, parent);
            run_begin = index + 1;
            continue;
        }
        const BlockId id = ids[index];
        Block& block = at(id);
        if (block.is_cached || block.references == 0) {
            throw Broken(name(id) + " was committed before, or is held by nobody");
        }
        const auto before = index > 0 ? std::optional(hashes[index - 1].low) : parent;
        block.hash = hashes[index];
        block.is_cached = true;
        block.has_parent = before.has_value();
        block.parent = before.value_or(0);
        index_.insert(block.hash, id);
        if (tenants_) {
            tenants_->own(id, 0);
        }
        if (eviction_) {
            enter_cache(id, block);
        }
    }
    tell_stored(hashes, run_begin, hashes.size(), parent);
}

void Pool::forget(std::span<const BlockId> ids) {
    for (const BlockId id : ids) {
        Block& block = at(id);
        if (block.references == 0) {
            throw Broken(name(id) + " is held by nobody");
        }
        if (block.is_cached) {
            index_.erase(block.hash, id);
            block.is_cached = false;
            if (eviction_) {
                eviction_->forgotten(id);
                leave_cache(block);
            }
            tell_removed(block.hash);
        }
    }
}

void Pool::reset() {
    if (eviction_) {
        eviction_->reset();
        nodes_ = {};
    }
    if (tenants_) {
        tenants_->reset();
    }
    while (first_idle_ != kNone) {
        const BlockId id = first_idle_;
        free_.push_back(id);
        at(id).is_cached = false;
        unlink_idle(id);
    }
    for (Block& block : blocks_) {
        block.is_cached = false;
    }
    index_.clear();
    if (!changes_.empty() && changes_.back().kind == Change::kRemoved) {
        changes_.pop_back();  // clearing says it too
    }
    changes_.push_back({Change::kCleared, std::nullopt, {}});
}

std::vector<Hash> Pool::resident_hashes() const {
    std::vector<Hash> hashes;
    hashes.reserve(num_cached());
    for (const Block& block : blocks_) {
        if (block.is_cached) {
            hashes.push_back(block.hash);
        }
    }
    return hashes;
}

std::vector<BlockId> Pool::idle_blocks() const {
    std::vector<BlockId> ids;
    ids.reserve(num_idle_);
    for (BlockId id = first_idle_; id != kNone; id = at(id).after) {
        ids.push_back(id);
    }
    return ids;
}

std::vector<std::pair<BlockId, std::int32_t>> Pool::references() const {
    std::vector<std::pair<BlockId, std::int32_t>> held;
    for (std::size_t index = 0; index < blocks_.size(); ++index) {
        if (blocks_[index].references > 0) {
            held.emplace_back(static_cast<BlockId>(index), blocks_[index].references);
        }
    }
    return held;
}

void Pool::check() const {
    std::vector<bool> is_free(blocks_.size());
    for (const BlockId id : free_) {
        const Block& block = at(id);
        const auto index = static_cast<std::size_t>(id);
        require(!is_free[index], name(id) + " is free twice");
        require(block.references == 0 && !block.is_cached, name(id) + " is free, but held or cached");
        is_free[index] = true;
    }
    std::size_t num_linked = 0;
    BlockId before = kNone;
    for (BlockId id = first_idle_; id != kNone; id = at(id).after) {
        require(at(id).is_idle(), name(id) + " is in the idle list, but held or not cached");
        require(at(id).before == before, name(id) + ": the idle list does not lead back");
        require(++num_linked <= num_idle_, "the idle list is longer than counted");
        before = id;
    }
    require(last_idle_ == before, "the idle list ends elsewhere");
    require(num_linked == num_idle_, "the idle list is shorter than counted");
    std::size_t num_idle = 0;
    std::size_t num_cached = 0;
    for (std::size_t index = 0; index < blocks_.size(); ++index) {
        const Block& block = blocks_[index];
        const auto id = static_cast<BlockId>(index);
        require(block.references >= 0, name(id) + " has fewer references than none");
        require(block.references > 0 || block.is_cached || is_free[index], name(id) + " is lost");
        require(!block.is_cached || find(block.hash) == id, name(id) + ": its hash names another");
        num_idle += block.is_idle();
        num_cached += block.is_cached;
    }
    require(num_idle == num_idle_, "an idle block is not in the list");
    require(num_cached == index_.size(), "a hash names no block");
    if (eviction_) {
        check_leaves();
    }
    if (tenants_) {
        std::size_t num_leaves = 0;
        for (std::size_t index = 0; index < blocks_.size(); ++index) {
            num_leaves += eviction_ ? eviction_->is_leaf(static_cast<BlockId>(index)) : blocks_[index].is_idle();
        }
        tenants_->check(num_idle_, num_leaves);
    }
}

void Pool::check_leaves() const {
    std::size_t num_children = 0;
    std::size_t num_with_parent = 0;
    std::size_t num_nodes = 0;
    nodes_.for_each([&](std::uint64_t, const Node& node) {
        num_children += static_cast<std::size_t>(node.idle_children);
        num_nodes += static_cast<std::size_t>(node.num_cached);
        if (node.idle != kNone) {
            require(at(node.idle).is_idle(), name(node.idle) + " is known as idle");
            require(eviction_->is_leaf(node.idle) == (node.idle_children == 0), name(node.idle) + ": a leaf has no idle children");
        }
    });
    for (std::size_t index = 0; index < blocks_.size(); ++index) {
        const Block& block = blocks_[index];
        num_with_parent += block.is_idle() && block.has_parent;
        require(block.is_idle() || !eviction_->is_leaf(static_cast<BlockId>(index)),
                name(static_cast<BlockId>(index)) + " may go, but is not idle");
    }
    require(num_children == num_with_parent, "a parent's children are counted wrong");
    require(num_nodes == index_.size(), "a cached block has no node");
    eviction_->check();
}

Pool::Block& Pool::at(BlockId id) { return const_cast<Block&>(std::as_const(*this).at(id)); }

const Pool::Block& Pool::at(BlockId id) const {
    if (id < 0 || static_cast<std::size_t>(id) >= blocks_.size()) {
        throw Broken(name(id) + " was never given out");
    }
    return blocks_[static_cast<std::size_t>(id)];
}

BlockId Pool::find(Hash hash) const {
    return index_.find(hash, [&](BlockId id) { return blocks_[static_cast<std::size_t>(id)].hash; });
}

void Pool::append_idle(BlockId id) {
    Block& block = at(id);
    block.before = last_idle_;
    block.after = kNone;
    (last_idle_ == kNone ? first_idle_ : at(last_idle_).after) = id;
    last_idle_ = id;
    ++num_idle_;
    if (tenants_) {
        tenants_->enter_idle(id);
    }
    if (eviction_) {
        enter_idle(id, block);
    } else if (tenants_) {
        tenants_->add_leaf(id);
    }
}

void Pool::unlink_idle(BlockId id) {
    const Block& block = at(id);
    (block.before == kNone ? first_idle_ : at(block.before).after) = block.after;
    (block.after == kNone ? last_idle_ : at(block.after).before) = block.before;
    --num_idle_;
    if (eviction_ && block.is_cached) {
        leave_idle(id, block);
    } else if (tenants_ && block.is_cached) {
        tenants_->remove_leaf(id);
    }
    if (tenants_ && block.is_cached) {
        tenants_->leave_idle(id);
    }
}

void Pool::evict(std::size_t count, std::vector<BlockId>* gone) {
    for (; count > 0; --count) {
        const BlockId id = victim();
        Block& block = at(id);
        unlink_idle(id);
        index_.erase(block.hash, id);
        block.is_cached = false;
        if (eviction_) {
            eviction_->evicted(id, block.hash);
            leave_cache(block);
        }
        free_.push_back(id);
        tell_removed(block.hash);
        if (gone != nullptr) {
            gone->push_back(id);
        }
    }
}

void Pool::tell_removed(Hash hash) {
    if (changes_.empty() || changes_.back().kind != Change::kRemoved) {
        changes_.push_back({Change::kRemoved, std::nullopt, {}});
    }
    changes_.back().hashes.push_back(hash.low);
}

void Pool::tell_stored(std::span<const Hash> hashes, std::size_t begin, std::size_t end,
                       std::optional<std::uint64_t> parent) {
    if (begin == end) {
        return;
    }
    Change change{Change::kStored, begin > 0 ? hashes[begin - 1].low : parent, {}};
    change.hashes.reserve(end - begin);
    for (const Hash hash : hashes.subspan(begin, end - begin)) {
        change.hashes.push_back(hash.low);
    }
    changes_.push_back(std::move(change));
}

}  // namespace penstock
