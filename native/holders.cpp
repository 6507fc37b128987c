#include "holders.hpp"

#include <algorithm>

namespace penstock {

std::uint64_t HoldersTable::digest(Holding holding) {
    std::uint64_t x = holding.bits() + 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

Holding HoldersTable::find(HoldersId id, std::uint32_t worker) const {
    const std::span<const std::uint64_t> set = entries(id);
    const auto at = std::ranges::lower_bound(set, worker, {}, worker_of);
    return at != set.end() && worker_of(*at) == worker ? Holding(*at) : Holding(worker);
}

HoldersId HoldersTable::with(HoldersId id, Holding holding) {
    const std::span<const std::uint64_t> old = entries(id);
    const auto at = std::ranges::lower_bound(old, holding.worker(), {}, worker_of);
    scratch_.assign(old.begin(), at);
    std::uint64_t sum = sets_[id].digest;
    if (holding.has_copies()) {
        scratch_.push_back(holding.bits());
        sum += digest(holding);
    }
    const bool replaces = at != old.end() && worker_of(*at) == holding.worker();
    if (replaces) {
        sum -= digest(Holding(*at));
    }
    scratch_.insert(scratch_.end(), at + replaces, old.end());
    return find_or_add_scratch(sum);
}

HoldersId HoldersTable::find_or_add_scratch(std::uint64_t sum) {
    if (scratch_.empty()) {
        return kNobody;
    }
    Indexed& indexed = by_digest_.find_or_insert(sum);
    if (!indexed.vacant() && std::ranges::equal(entries(indexed.id), scratch_)) {
        return indexed.id;
    }
    HoldersId fresh;
    if (free_.empty()) {
        fresh = static_cast<HoldersId>(sets_.size());
        sets_.grow(sets_.size() + 1);
    } else {
        fresh = free_.back();
        free_.pop_back();
    }
    if (indexed.vacant()) { // else two sets with one digest, and this one is not found again
        indexed.id = fresh;
    }
    Set& set = sets_[fresh];
    set.digest = sum;
    set.size = static_cast<std::uint32_t>(scratch_.size());
    if (set.size > 1) {
        set.many = std::make_unique_for_overwrite<std::uint64_t[]>(set.size);
        std::ranges::copy(scratch_, set.many.get());
        entries_bytes_ += set.size * sizeof(std::uint64_t);
    } else {
        set.one = scratch_.front();
    }
    return fresh;
}

void HoldersTable::release(HoldersId id) {
    Set& set = sets_[id];
    if (id == kNobody || --set.references != 0) {
        return;
    }
    const Indexed* indexed = by_digest_.find(set.digest);
    if (indexed != nullptr && indexed->id == id) {
        by_digest_.erase(set.digest);
    }
    entries_bytes_ -= set.size > 1 ? set.size * sizeof(std::uint64_t) : 0;
    set = Set{};
    free_.push_back(id);
}

std::size_t HoldersTable::bytes() const {
    return sets_.bytes() + entries_bytes_ + by_digest_.bytes() +
           free_.capacity() * sizeof(HoldersId);
}

void HoldersTable::check(std::span<const std::uint32_t> references) const {
    std::size_t unused = 0;
    for (HoldersId id = 1; id < sets_.size(); ++id) {
        const Set& set = sets_[id];
        require(set.references == references[id], "holders: references are the blocks held so");
        require((set.size == 0) == (set.references == 0), "holders: a set is kept while a block is held so");
        unused += set.size == 0;
        const std::span<const std::uint64_t> all = entries(id);
        std::uint64_t sum = 0;
        for (std::size_t i = 0; i < all.size(); ++i) {
            require(Holding(all[i]).has_copies(), "holders: each has a copy");
            require(i == 0 || worker_of(all[i - 1]) < worker_of(all[i]), "holders: one entry a worker, in order");
            sum += digest(Holding(all[i]));
        }
        require(sum == set.digest, "holders: the digest is the sum over the entries");
    }
    require(unused == free_.size(), "holders: unused ids can be found");
}

}  // namespace penstock
