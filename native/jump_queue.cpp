#include "jump_queue.hpp"

#include <algorithm>
#include <limits>

namespace penstock {

void JumpQueue::reorder(std::optional<double> ageing) {
    ageing_ = ageing;
    turns_.clear();
    waiting_.sort([](const JumpSequence* one, const JumpSequence* other) { return one->number < other->number; });
    new_.clear();
    if (has_turns()) {
        new_.assign(waiting_.begin(), waiting_.end());
    }
    for (JumpSequence* sequence : waiting_) {
        sequence->rank.reset();
    }
}

void JumpQueue::push(JumpSequence& sequence) {
    add(sequence, waiting_.end());
    sequence.rank.reset();
    if (has_turns()) {
        new_.push_back(&sequence);
    }
}

void JumpQueue::push_front(JumpSequence& sequence) {
    add(sequence, waiting_.begin());
    if (has_turns()) {
        place(sequence, -std::numeric_limits<double>::infinity());
    }
}

void JumpQueue::remove(JumpSequence& sequence) {
    waiting_.erase(*sequence.place);
    sequence.place.reset();
    num_tokens_ -= sequence.known;
    if (!has_turns()) {
        return;
    }
    if (sequence.rank) {
        turns_.erase({*sequence.rank, sequence.number, &sequence});
    } else {
        std::erase(new_, &sequence);
    }
}

double JumpQueue::rank_of(const JumpSequence& sequence, Count lacking) const {
    return static_cast<double>(lacking) + *ageing_ * static_cast<double>(sequence.since_tokens);
}

void JumpQueue::check() const {
    Count num_tokens = 0;
    for (const JumpSequence* sequence : waiting_) {
        require(sequence->blocks.empty() && !sequence->joined, "waiting: who waits holds nothing");
        num_tokens += sequence->known;
    }
    require(num_tokens == num_tokens_, "waiting tokens: summed up");
    if (!has_turns()) {
        require(std::ranges::is_sorted(waiting_, {}, &JumpSequence::number), "waiting: the oldest first");
        return;
    }
    require(new_.size() + turns_.size() == waiting_.size(), "turns: of all that wait");
    for (const auto& [rank, number, sequence] : turns_) {
        require(sequence->rank == rank && sequence->number == number, "turns: each at its own rank");
    }
}

void JumpQueue::add(JumpSequence& sequence, std::list<JumpSequence*>::const_iterator before) {
    sequence.place = waiting_.insert(before, &sequence);
    num_tokens_ += sequence.known;
}

void JumpQueue::place(JumpSequence& sequence, double rank) {
    sequence.rank = rank;
    turns_.emplace(rank, sequence.number, &sequence);
}

}  // namespace penstock
