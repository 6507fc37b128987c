#include "hash_index.hpp"

#include <algorithm>
#include <utility>

namespace penstock {
namespace {

constexpr std::size_t kFirstSlots = 64;

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

}  // namespace penstock
