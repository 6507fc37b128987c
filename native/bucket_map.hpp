// A map from block hashes to small values that never moves more than a few thousand of them at once.

#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "flat_map.hpp"

namespace penstock {

// Flat maps of at most `kSlotsMax` slots; one that is full becomes two, told apart by one more bit of the keys.
//
// A copy is a view of what is there now, for as long as it is kept: it costs a pointer for each flat map, and whoever
// changes the original copies the flat map that is touched. Nobody changes a view. Pointers into the map hold until the
// next insertion that there was no `reserve` for, or the next erasure.
//
// Source: extendible hashing, Fagin, Nievergelt, Pippenger and Strong, 1979.
template <class Value>
class BucketMap {
  public:
    BucketMap() { clear(); }

    // Gives a view.
    BucketMap view() {
        has_views_ = true;
        return *this;
    }

    std::size_t size() const { return size_; }
    std::size_t bytes() const {
        std::size_t bytes = directory_.capacity() * sizeof(Bucket*) + buckets_.capacity() * sizeof(buckets_[0]);
        for (const auto& bucket : buckets_) {
            bytes += bucket->map.bytes();
        }
        return bytes;
    }

    // Ask for a key's cache line ahead of its use.
    void prefetch(std::uint64_t key) const { at(key).map.prefetch(key); }

    const Value* find(std::uint64_t key) const { return at(key).map.find(key); }
    Value* find(std::uint64_t key) { return own(key).map.find(key); }

    // Give the key's value, which is vacant where the key is new: the caller then assigns what is not.
    Value& find_or_insert(std::uint64_t key) {
        reserve(key, 1);
        Bucket& bucket = own(key);
        const std::size_t before = bucket.map.size();
        Value& value = bucket.map.find_or_insert(key);
        size_ += bucket.map.size() - before;
        return value;
    }

    // Erase a key that is there.
    void erase(std::uint64_t key) {
        own(key).map.erase(key);
        --size_;
    }

    // Make room, so that this many insertions of keys beside this one keep pointers valid.
    void reserve(std::uint64_t key, std::size_t more) {
        while (true) {
            Bucket& bucket = own(key);
            const bool fits = (bucket.map.size() + more) * 4 <= kSlotsMax * 3;
            if (fits || bucket.depth >= depth_max()) {
                bucket.map.reserve(more);
                return;
            }
            split(bucket);
        }
    }

    // Begin anew; gives the flat maps there were, so that their memory can be given back a part at a time.
    std::vector<std::shared_ptr<void>> clear() {
        std::vector<std::shared_ptr<void>> old(std::make_move_iterator(buckets_.begin()),
                                               std::make_move_iterator(buckets_.end()));
        buckets_ = decltype(buckets_)();
        buckets_.push_back(std::make_shared<Bucket>());
        directory_ = {buckets_.front().get()};
        depth_ = 0;
        size_ = 0;
        return old;
    }

    // Call with (key, value) of every entry, in no order. The call must not insert or erase.
    template <class Call>
    void for_each(Call&& call) const {
        for (const auto& bucket : buckets_) {
            std::as_const(bucket->map).for_each(call);
        }
    }

    // The flat maps it is made of, for who goes through them a part at a time.
    std::size_t num_maps() const { return buckets_.size(); }
    const FlatMap<Value>& map(std::size_t index) const { return buckets_[index]->map; }
    std::size_t map_of(std::uint64_t key) const { return at(key).index; }

  private:
    static constexpr std::size_t kSlotsMax = 4096;

    struct Bucket {
        FlatMap<Value> map;
        std::size_t index = 0; // among the buckets
        int depth = 0;         // bits of the directory that its keys have in common
    };

    // Keys that hardly differ make no long directory.
    int depth_max() const { return static_cast<int>(std::bit_width(size_ / kSlotsMax)) + 3; }

    std::size_t place(std::uint64_t key) const {
        return depth_ == 0 ? 0 : (key * 0xc2b2ae3d27d4eb4f ^ key) >> (64 - depth_);
    }
    const Bucket& at(std::uint64_t key) const { return *directory_[place(key)]; }

    Bucket& own(std::uint64_t key) {
        Bucket* bucket = directory_[place(key)];
        if (has_views_ && buckets_[bucket->index].use_count() > 1) {
            auto copy = std::make_shared<Bucket>(*bucket);
            const std::size_t count = directory_.size() >> bucket->depth;
            std::fill_n(directory_.begin() + static_cast<std::ptrdiff_t>(place(key) / count * count), count, copy.get());
            bucket = copy.get();
            buckets_[bucket->index] = std::move(copy);
        }
        return *bucket;
    }

    void split(Bucket& full) {
        if (full.depth == depth_) {
            std::vector<Bucket*> twice(directory_.size() * 2);
            for (std::size_t i = 0; i < twice.size(); ++i) {
                twice[i] = directory_[i / 2];
            }
            directory_.swap(twice);
            ++depth_;
        }
        FlatMap<Value> old;
        std::swap(old, full.map);
        ++full.depth;
        auto other = std::make_shared<Bucket>();
        other->index = buckets_.size();
        other->depth = full.depth;
        const auto first = std::ranges::find(directory_, &full); // they lie side by side
        const auto count = static_cast<std::ptrdiff_t>(directory_.size() >> full.depth);
        std::fill_n(first + count, count, other.get());
        full.map.reserve(old.size() / 2);
        other->map.reserve(old.size() / 2);
        buckets_.push_back(std::move(other));
        std::as_const(old).for_each([&](std::uint64_t key, const Value& value) {
            directory_[place(key)]->map.find_or_insert(key) = value;
        });
    }

    std::vector<Bucket*> directory_;
    std::vector<std::shared_ptr<Bucket>> buckets_;
    int depth_ = 0;
    std::size_t size_ = 0;
    bool has_views_ = false; // or had
};

}  // namespace penstock
