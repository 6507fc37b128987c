// A map from block hashes to small values, in one flat array: a look-up touches one cache line nearly always.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace penstock {

// Open addressing with linear probing; erasing closes the gap, so there are no tombstones. Any 64-bit key is valid.
//
// `Value` is small and trivially copied, and has `bool vacant() const`, true for `Value{}` and false for all that is
// kept. Pointers into the map hold until the next insertion, erasure or reservation.
template <class Value>
class FlatMap {
  public:
    struct Slot {
        std::uint64_t key;
        Value value;
    };

    std::size_t size() const { return size_; }
    std::size_t bytes() const { return slots_.capacity() * sizeof(Slot); }

    // Ask for a key's cache line ahead of its use.
    void prefetch(std::uint64_t key) const {
        if (!slots_.empty()) {
            __builtin_prefetch(&slots_[home(key)]);
        }
    }

    Value* find(std::uint64_t key) { return const_cast<Value*>(std::as_const(*this).find(key)); }

    const Value* find(std::uint64_t key) const {
        if (slots_.empty()) {
            return nullptr;
        }
        for (std::size_t at = home(key);; at = (at + 1) & mask_) {
            const Slot& slot = slots_[at];
            if (slot.value.vacant()) {
                return nullptr;
            }
            if (slot.key == key) {
                return &slot.value;
            }
        }
    }

    // Give the key's value, which is vacant where the key is new: the caller then assigns what is not.
    Value& find_or_insert(std::uint64_t key) {
        reserve(1);
        for (std::size_t at = home(key);; at = (at + 1) & mask_) {
            Slot& slot = slots_[at];
            if (slot.value.vacant()) {
                slot.key = key;
                ++size_;
                return slot.value;
            }
            if (slot.key == key) {
                return slot.value;
            }
        }
    }

    // Erase a key that is there.
    void erase(std::uint64_t key) {
        std::size_t at = home(key);
        while (slots_[at].key != key || slots_[at].value.vacant()) {
            at = (at + 1) & mask_;
        }
        erase_at(at);
    }

    // Make room, so that this many insertions keep pointers valid.
    void reserve(std::size_t more) {
        if ((size_ + more) * 4 > slots_.size() * 3) {
            rehash(std::bit_ceil((size_ + more) * 4 / 3 + 8));
        }
    }

    // Call with (key, value) of every entry, in no order. The call must not insert or erase.
    template <class Call>
    void for_each(Call&& call) {
        for (Slot& slot : slots_) {
            if (!slot.value.vacant()) {
                call(std::as_const(slot.key), slot.value);
            }
        }
    }

    template <class Call>
    void for_each(Call&& call) const {
        for (const Slot& slot : slots_) {
            if (!slot.value.vacant()) {
                call(slot.key, slot.value);
            }
        }
    }

    // Slots are numbered below `num_slots`; a value is in the same one until the next change.
    std::size_t num_slots() const { return slots_.size(); }
    std::pair<std::uint64_t, const Value*> slot(std::size_t index) const {
        return {slots_[index].key, &slots_[index].value};
    }
    std::size_t slot_of(const Value& value) const {
        const auto* slot = reinterpret_cast<const std::byte*>(&value) - offsetof(Slot, value);
        return static_cast<std::size_t>(reinterpret_cast<const Slot*>(slot) - slots_.data());
    }

  private:
    void erase_at(std::size_t gap) {
        for (std::size_t at = (gap + 1) & mask_; !slots_[at].value.vacant(); at = (at + 1) & mask_) {
            if (((at - home(slots_[at].key)) & mask_) >= ((at - gap) & mask_)) { // it may lie in the gap
                slots_[gap] = slots_[at];
                gap = at;
            }
        }
        slots_[gap].value = Value{};
        --size_;
    }

    // The multiplication spreads keys that are no good hashes; its upper bits are the good ones.
    std::size_t home(std::uint64_t key) const { return key * 0x9e3779b97f4a7c15 >> shift_; }

    void rehash(std::size_t capacity) {
        std::vector<Slot> old(capacity, Slot{});
        old.swap(slots_);
        mask_ = capacity - 1;
        shift_ = 64 - std::countr_zero(capacity);
        for (const Slot& slot : old) {
            if (!slot.value.vacant()) {
                std::size_t at = home(slot.key);
                while (!slots_[at].value.vacant()) {
                    at = (at + 1) & mask_;
                }
                slots_[at] = slot;
            }
        }
    }

    std::vector<Slot> slots_;
    std::size_t mask_ = 0;
    std::size_t size_ = 0;
    int shift_ = 0;
};

}  // namespace penstock
