#include "jump_queue.hpp"

#include <algorithm>
#include <limits>

namespace penstock {

void JumpQueue::reorder(std::optional<double> ageing) {
    ageing_ = ageing;
    turns_.reset();
    tenant_.reset();
    rank_all();
}

void JumpQueue::rank_all() {
    by_rank_.clear();
    waiting_.sort([](const JumpSequence* one, const JumpSequence* other) { return one->number < other->number; });
    new_.clear();
    if (is_ranked()) {
        new_.assign(waiting_.begin(), waiting_.end());
    }
    for (JumpSequence* sequence : waiting_) {
        sequence->rank.reset();
    }
}

void JumpQueue::push(JumpSequence& sequence) {
    const auto tenant = sequence.use.tenant;
    if (!is_ranked() && tenant_.value_or(tenant) != tenant) {
        turns_.emplace(*tenant_);
        rank_all();
    }
    tenant_ = tenant;
    add(sequence, waiting_.end());
    sequence.rank.reset();
    if (is_ranked()) {
        new_.push_back(&sequence);
    }
}

void JumpQueue::push_front(JumpSequence& sequence) {
    add(sequence, waiting_.begin());
    if (is_ranked()) {
        place(sequence, -std::numeric_limits<double>::infinity());
    }
}

void JumpQueue::remove(JumpSequence& sequence) {
    waiting_.erase(*sequence.place);
    sequence.place.reset();
    num_tokens_ -= sequence.known;
    if (!is_ranked()) {
        return;
    }
    if (sequence.rank) {
        by_rank_.erase({*sequence.rank, sequence.number, &sequence});
    } else {
        std::erase(new_, &sequence);
    }
}

double JumpQueue::rank_of(JumpSequence& sequence, Count lacking) {
    if (turns_) {
        return turns_->rank(sequence, lacking);
    }
    return static_cast<double>(lacking) + *ageing_ * static_cast<double>(sequence.since_tokens);
}

void JumpQueue::check() const {
    Count num_tokens = 0;
    for (const JumpSequence* sequence : waiting_) {
        require(sequence->blocks.empty() && !sequence->joined, "waiting: who waits holds nothing");
        num_tokens += sequence->known;
    }
    require(num_tokens == num_tokens_, "waiting tokens: summed up");
    if (!is_ranked()) {
        require(std::ranges::is_sorted(waiting_, {}, &JumpSequence::number), "waiting: the oldest first");
        return;
    }
    require(new_.size() + by_rank_.size() == waiting_.size(), "by rank: all that wait");
    for (const auto& [rank, number, sequence] : by_rank_) {
        require(sequence->rank == rank && sequence->number == number, "by rank: each at its own");
    }
}

void JumpQueue::add(JumpSequence& sequence, std::list<JumpSequence*>::const_iterator before) {
    sequence.place = waiting_.insert(before, &sequence);
    num_tokens_ += sequence.known;
}

void JumpQueue::place(JumpSequence& sequence, double rank) {
    sequence.rank = rank;
    by_rank_.emplace(rank, sequence.number, &sequence);
}

}  // namespace penstock
