// Who holds a block, and how many copies in which tier: shared by all blocks that are held alike.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "bucket_map.hpp"
#include "chunked.hpp"

namespace penstock {

constexpr std::size_t kTiers = 4;
constexpr std::uint32_t kCopiesMax = 4095; // of one block on one worker in one tier; further ones are not counted

inline void require(bool holds, const char* what) {
    if (!holds) {
        throw std::logic_error(what);
    }
}

// One worker's copies of one block: the worker in the upper 16 bits, 12 bits for each tier below. Entries of a
// block are kept in ascending order, which is that of the workers.
class Holding {
  public:
    explicit Holding(std::uint64_t bits) : bits_(bits) {}
    explicit Holding(std::uint32_t worker) : bits_(std::uint64_t{worker} << kWorkerShift) {}

    std::uint64_t bits() const { return bits_; }
    std::uint32_t worker() const { return static_cast<std::uint32_t>(bits_ >> kWorkerShift); }
    bool has_copies() const { return bits_ << 16 != 0; }

    std::uint32_t copies(std::size_t tier) const {
        return static_cast<std::uint32_t>(bits_ >> tier * kCopyBits) & kCopiesMax;
    }

    // The nearest tier with a copy; there must be one.
    std::size_t best_tier() const { return static_cast<std::size_t>(std::countr_zero(bits_)) / kCopyBits; }

    Holding more(std::size_t tier) const {
        return Holding(copies(tier) == kCopiesMax ? bits_ : bits_ + one_copy(tier));
    }
    Holding less(std::size_t tier) const { return Holding(bits_ - one_copy(tier)); }

  private:
    static constexpr std::size_t kWorkerShift = 48;
    static constexpr std::size_t kCopyBits = 12;

    static std::uint64_t one_copy(std::size_t tier) { return std::uint64_t{1} << tier * kCopyBits; }

    std::uint64_t bits_;
};

inline std::uint32_t worker_of(std::uint64_t entry) { return Holding(entry).worker(); }

using HoldersId = std::uint32_t;

// Sets of holdings, each kept once however many blocks are held alike: along a chain they nearly always are.
class HoldersTable {
  public:
    static constexpr HoldersId kNobody = 0;

    HoldersTable() { sets_.grow(1); }

    std::span<const std::uint64_t> entries(HoldersId id) const {
        const Set& set = sets_[id];
        return {set.size > 1 ? set.many.get() : &set.one, set.size};
    }

    std::size_t num_ids() const { return sets_.size(); }
    std::size_t bytes() const;

    // A worker's holding, without copies where it has none.
    Holding find(HoldersId id, std::uint32_t worker) const;

    bool contains(HoldersId id, std::uint32_t worker) const { return find(id, worker).has_copies(); }

    // Give the set with this holding in place of the worker's present one; without copies, with none. The caller
    // must `retain` it before it releases any other.
    HoldersId with(HoldersId id, Holding holding);

    // Give the set with those only whose entry `is_kept`; likewise.
    template <class IsKept>
    HoldersId filtered(HoldersId id, const IsKept& is_kept) {
        scratch_.clear();
        std::uint64_t sum = 0;
        for (const std::uint64_t entry : entries(id)) {
            if (is_kept(entry)) {
                scratch_.push_back(entry);
                sum += digest(Holding(entry));
            }
        }
        return find_or_add_scratch(sum);
    }

    void retain(HoldersId id) { ++sets_[id].references; }
    void release(HoldersId id);

    // Raise std::logic_error where the table contradicts itself or these counts of references.
    void check(std::span<const std::uint32_t> references) const;

  private:
    struct Set {
        std::uint64_t digest = 0; // the sum over the entries, so that one change gives the next digest
        std::uint64_t one = 0;
        std::unique_ptr<std::uint64_t[]> many;
        std::uint32_t size = 0;
        std::uint32_t references = 0;
    };
    struct Indexed {
        HoldersId id = kNobody;
        bool vacant() const { return id == kNobody; }
    };

    static std::uint64_t digest(Holding holding);

    HoldersId find_or_add_scratch(std::uint64_t sum);

    Chunked<Set, 64> sets_; // the first is nobody's
    std::vector<HoldersId> free_;
    BucketMap<Indexed> by_digest_;
    std::size_t entries_bytes_ = 0;
    std::vector<std::uint64_t> scratch_;
};

}  // namespace penstock
