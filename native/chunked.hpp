// An array that grows without moving what is in it.

#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace penstock {

template <class Value, std::size_t kChunk>
class Chunked {
  public:
    std::size_t size() const { return size_; }
    std::size_t bytes() const { return chunks_.size() * kChunk * sizeof(Value); }

    Value& operator[](std::size_t index) { return chunks_[index / kChunk][index % kChunk]; }
    const Value& operator[](std::size_t index) const { return chunks_[index / kChunk][index % kChunk]; }

    // Have at least so many.
    void grow(std::size_t size) {
        while (chunks_.size() * kChunk < size) {
            chunks_.push_back(std::make_unique<Value[]>(kChunk));
        }
        size_ = size > size_ ? size : size_;
    }

    // Begin anew; gives the chunks there were, so that their memory can be given back a part at a time.
    std::vector<std::shared_ptr<void>> clear() {
        std::vector<std::shared_ptr<void>> old;
        for (auto& chunk : chunks_) {
            old.emplace_back(chunk.release(), std::default_delete<Value[]>());
        }
        chunks_ = decltype(chunks_)();
        size_ = 0;
        return old;
    }

  private:
    std::vector<std::unique_ptr<Value[]>> chunks_;
    std::size_t size_ = 0;
};

}  // namespace penstock
