#include "pool.hpp"

#include <algorithm>
#include <bit>
#include <ranges>
#include <string>

namespace penstock {
namespace {

constexpr std::size_t kFirstSlots = 64;

std::string name(BlockId id) { return "block " + std::to_string(id); }

// For checks; where speed counts, the text is only made when it is thrown.
void require(bool condition, const std::string& otherwise) {
    if (!condition) {
        throw Broken(otherwise);
    }
}

}  // namespace

void HashIndex::insert(Hash hash, BlockId id) {
    if (2 * (size_ + 1) > slots_.size()) {
        grow();
    }
    place({tag_of(hash), id});
    ++size_;
}

void HashIndex::erase(Hash hash, BlockId id) {
    std::size_t gap = home(tag_of(hash));
    while (slots_[gap].id != id) {
        gap = next(gap);
    }
    // What follows moves up, unless that would be before its home.
    const std::size_t mask = slots_.size() - 1;
    for (std::size_t at = next(gap); slots_[at].id != kEmpty; at = next(at)) {
        if (((at - home(slots_[at].tag)) & mask) >= ((at - gap) & mask)) {
            slots_[gap] = slots_[at];
            gap = at;
        }
    }
    slots_[gap] = {};
    --size_;
}

void HashIndex::clear() {
    std::ranges::fill(slots_, Slot{});
    size_ = 0;
}

void HashIndex::place(Slot slot) {
    std::size_t at = home(slot.tag);
    while (slots_[at].id != kEmpty) {
        at = next(at);
    }
    slots_[at] = slot;
}

void HashIndex::grow() {
    const std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(std::max(kFirstSlots, 2 * slots_.size())));
    shift_ = 32 - std::countr_zero(slots_.size());
    for (const Slot slot : old) {
        if (slot.id != kEmpty) {
            place(slot);
        }
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
    std::vector<GivenUp> given_up;
    if (count > num_available() || count <= num_without_eviction()) {
        return given_up;
    }
    count -= num_without_eviction();
    std::vector<BlockId> victims;
    for (BlockId id = first_idle_; victims.size() < count; id = at(id).after) {
        victims.push_back(id);
    }
    for (const BlockId id : std::views::reverse(victims)) {  // of one sequence the first block is unused for the least time
        const Block& block = at(id);
        if (given_up.empty() || !block.has_parent || block.parent != given_up.back().hashes.back().low) {
            given_up.push_back({{}, {}, block.has_parent ? std::optional(block.parent) : std::nullopt});
        }
        given_up.back().ids.push_back(id);
        given_up.back().hashes.push_back(block.hash);
    }
    std::ranges::reverse(given_up);
    evict(count);
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
        } else {
            id = free_.back();
            free_.pop_back();
        }
        at(id).references = 1;
    }
    return ids;
}

void Pool::release(std::span<const BlockId> ids) {
    for (std::size_t index = ids.size(); index-- > 0;) {
        const BlockId id = ids[index];
        Block& block = at(id);
        if (block.references == 0) {
            throw Broken(name(id) + " was released more often than it was taken");
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
            tell_removed(block.hash);
        }
    }
}

void Pool::reset() {
    while (first_idle_ != kNone) {
        free_.push_back(first_idle_);
        unlink_idle(first_idle_);
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
}

void Pool::unlink_idle(BlockId id) {
    const Block& block = at(id);
    (block.before == kNone ? first_idle_ : at(block.before).after) = block.after;
    (block.after == kNone ? last_idle_ : at(block.after).before) = block.before;
    --num_idle_;
}

void Pool::evict(std::size_t count) {
    for (; count > 0; --count) {
        const BlockId id = first_idle_;
        Block& block = at(id);
        unlink_idle(id);
        index_.erase(block.hash, id);
        block.is_cached = false;
        free_.push_back(id);
        tell_removed(block.hash);
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
