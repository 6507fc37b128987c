// Waiting requests of a simulated engine that hold what is cached of them, and load what lower tiers have, before their turn.
//
// The oracle is the Python reference in src/penstock/engine/scheduling/prefixes.py.

#include "jump_scheduler.hpp"

#include <algorithm>

namespace penstock {

bool JumpScheduler::may_hold() const {
    return tiers_ != nullptr && limits_.prefetched > 0 && may_look_ && !waiting_.empty();
}

// What is left to compute of running prompts.
JumpScheduler::Ahead JumpScheduler::prompts_left() const {
    Ahead left;
    for (const JumpSequence* sequence : batch_.running()) {
        if (sequence->joined) {
            continue;
        }
        const bool is_loading = std::ranges::find(batch_.onboarding(), sequence) != batch_.onboarding().end();
        const Count computed = is_loading ? size_of(sequence->blocks) * size_ : sequence->computed;
        if (sequence->known - computed > 1) {
            left.emplace_back(sequence->known - computed, computed);
        }
    }
    return left;
}

// Have the next that wait hold what is cached of them, as far as all of them fit beside what runs.
void JumpScheduler::hold_next() {
    if (!may_hold()) {
        return;
    }
    may_look_ = false;
    waiting_.rank_new([this](JumpSequence& sequence) { return lacking(sequence); });
    Count free = static_cast<Count>(pool_.num_available()) - blocks_reserved();
    std::vector<JumpSequence*> upcoming;
    waiting_.visit_in_turn([&](JumpSequence& sequence) {
        upcoming.push_back(&sequence);
        return size_of(upcoming) < limits_.prefetched;
    });
    std::optional<Ahead> ahead;
    Ahead passed;
    for (JumpSequence* each : upcoming) {
        JumpSequence& sequence = *each;
        free -= sequence.known / size_ + 1 - sequence.num_held() + windows_of(sequence, sequence.num_held());
        if (free < 0) {
            break;
        }
        if (!sequence.is_held) {
            if (size_of(holding_) == limits_.prefetched) {
                end_overtaken(upcoming);
            }
            ahead = ahead ? ahead : prompts_left();
            Ahead before = *ahead;
            before.insert(before.end(), passed.begin(), passed.end());
            hold(sequence, before);
        }
        const Count cached = sequence.num_held() * size_;
        passed.emplace_back(sequence.known - cached, cached);
    }
}

// End the newest prefetch of a sequence that is no longer among the next: others that came later are before it.
void JumpScheduler::end_overtaken(const std::vector<JumpSequence*>& upcoming) {
    for (auto at = holding_.rbegin(); at != holding_.rend(); ++at) {
        if (std::find(upcoming.begin(), upcoming.end(), *at) == upcoming.end()) {
            end_hold(**at);
            return;
        }
    }
}

void JumpScheduler::hold(JumpSequence& sequence, const Ahead& ahead) {
    Cached cached = match(sequence, ahead);
    sequence.num_taken = static_cast<Count>(pool_.count_idle(cached.hits));
    pool_.acquire(cached.hits);
    sequence.num_before = size_of(cached.hits);
    sequence.held = std::move(cached.hits);
    if (cached.num_lower > 0) {
        sequence.targets = tiers_->prefetch(sequence.number);
        sequence.num_taken += size_of(sequence.targets);
    }
    sequence.is_held = true;
    num_taken_ += sequence.num_taken;
    holding_.push_back(&sequence);
}

// Release what a sequence held while it waited, as it is admitted and holds its hits by now; gives the blocks that its load
// writes, which it goes on to hold.
std::vector<BlockId> JumpScheduler::pass_on(JumpSequence& sequence) {
    may_look_ = true; // another one is among the next
    if (!sequence.is_held) {
        return {};
    }
    pool_.release(sequence.held);
    std::optional<Count> uncounted;
    if (!sequence.cached_tokens) {
        uncounted = sequence.num_prompt - sequence.num_before * size_;
    }
    tiers_->use_prefetch(sequence.number, uncounted);
    auto targets = std::move(sequence.targets);
    unhold(sequence);
    return targets;
}

// Release what a waiting sequence holds, and cancel its load.
void JumpScheduler::end_hold(JumpSequence& sequence) {
    if (!sequence.is_held) {
        return;
    }
    tiers_->end_prefetch(sequence.number);
    auto blocks = std::move(sequence.held);
    blocks.insert(blocks.end(), sequence.targets.begin(), sequence.targets.end());
    unhold(sequence);
    pool_.release(blocks);
}

// End the newest prefetch but that of `first`, since others need its blocks; false without any.
bool JumpScheduler::give_way(const JumpSequence* first) {
    for (auto at = holding_.rbegin(); at != holding_.rend(); ++at) {
        if (*at != first) {
            end_hold(**at);
            return true;
        }
    }
    return false;
}

void JumpScheduler::unhold(JumpSequence& sequence) {
    num_taken_ -= sequence.num_taken;
    std::erase(holding_, &sequence);
    sequence.is_held = false;
    sequence.held.clear();
    sequence.targets.clear();
    sequence.num_before = sequence.num_taken = 0;
    sequence.is_short = false;
}

}  // namespace penstock
