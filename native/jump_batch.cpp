#include "jump_batch.hpp"

#include <algorithm>

namespace penstock {

namespace {

void insert_by_arrival(std::vector<JumpSequence*>& list, JumpSequence& sequence) {
    list.insert(std::ranges::upper_bound(list, sequence.number, {}, &JumpSequence::number), &sequence);
}

}  // namespace

void JumpBatch::admit(JumpSequence& sequence) {
    insert_by_arrival(running_, sequence);
    insert_by_arrival(prefilling_, sequence);
}

void JumpBatch::admit_to_onboard(JumpSequence& sequence) {
    insert_by_arrival(running_, sequence);
    onboarding_.push_back(&sequence);
}

void JumpBatch::end_onboarding(JumpSequence& sequence) {
    std::erase(onboarding_, &sequence);
    insert_by_arrival(prefilling_, sequence);
}

void JumpBatch::join(JumpSequence& sequence) {
    std::erase(prefilling_, &sequence);
    ++sequence.known;
    sequence.joined = tick_;
    context_ += sequence.known - tick_;
    phases_.insert(phase_of(sequence), {begins_at(sequence), sequence.number, &sequence});
    ends_.insert(end_of(sequence));
}

void JumpBatch::abort(JumpSequence& sequence) {
    sequence.is_aborted = true;
    if (sequence.joined) {
        ends_.erase(end_of(sequence));
    }
}

void JumpBatch::leave(JumpSequence& sequence) {
    std::erase(running_, &sequence);
    if (!sequence.joined) {
        std::erase(prefilling_, &sequence);
        std::erase(onboarding_, &sequence);
        return;
    }
    phases_.erase(phase_of(sequence));
    ends_.erase(end_of(sequence));
    context_ -= sequence.known - *sequence.joined;
    sequence.known += tick_ - *sequence.joined;
    sequence.computed = sequence.known - 1;
    sequence.joined.reset();
}

JumpSequence* JumpBatch::ended() const {
    if (ends_.empty() || next_end() > tick_) {
        return nullptr;
    }
    return std::get<JumpSequence*>(*ends_.begin());
}

Count JumpBatch::begins_at(const JumpSequence& sequence) const {
    const Count phase = (1 - sequence.known + *sequence.joined) % size_;
    return phase < 0 ? phase + size_ : phase;
}

// Where it is among the phases, or belongs.
std::vector<JumpBatch::Phase>::const_iterator JumpBatch::phase_of(const JumpSequence& sequence) const {
    return std::ranges::lower_bound(phases_, std::pair(begins_at(sequence), sequence.number), {},
                                    [](const Phase& phase) { return std::pair(phase.begins_at, phase.number); });
}

// Who begins a block within less than a block of ticks, as spans of the phases.
std::vector<JumpBatch::Span> JumpBatch::spans(Count first_tick, Count length) const {
    if (length == 0) {
        return {};
    }
    const auto index = [&](Count begins_at) {
        const auto found = std::ranges::lower_bound(phases_, begins_at, {}, &Phase::begins_at);
        return static_cast<std::size_t>(found - phases_.begin());
    };
    const Count phase = first_tick % size_;
    const Count end = phase + length;
    if (end <= size_) {
        return {{index(phase), index(end)}};
    }
    return {{index(phase), phases_.size()}, {0, index(end - size_)}};
}

Count JumpBatch::blocks_due(Count first_tick, Count steps) const {
    Count blocks = steps / size_ * size_of(phases_);
    for (const auto& [begin, end] : spans(first_tick, steps % size_)) {
        blocks += static_cast<Count>(end - begin);
    }
    return blocks;
}

void JumpBatch::add_beginning(std::vector<Share>& lacking, Count first_tick, Count steps) const {
    const Count rounds = steps / size_;
    if (rounds == 0) {
        for (const auto& [begin, end] : spans(first_tick, steps)) {
            for (std::size_t index = begin; index < end; ++index) {
                lacking.push_back({phases_[index].sequence, 1});
            }
        }
        return;
    }
    const std::size_t first = lacking.size();
    for (const Phase& phase : phases_) {
        lacking.push_back({phase.sequence, rounds});
    }
    for (const auto& [begin, end] : spans(first_tick, steps % size_)) {
        for (std::size_t index = begin; index < end; ++index) {
            ++lacking[first + index].amount;
        }
    }
}

void JumpBatch::check() const {
    Count context = 0;
    std::vector<const JumpSequence*> prefilling;
    std::set<End> ends;
    for (JumpSequence* sequence : running_) {
        require(!sequence->place, "running: who runs does not wait");
        if (!sequence->joined) {
            if (std::ranges::find(onboarding_, sequence) == onboarding_.end()) {
                prefilling.push_back(sequence);
            }
            continue;
        }
        context += sequence->known - *sequence->joined;
        const auto phase = phase_of(*sequence);
        require(phase != phases_.end() && phase->sequence == sequence, "phases: of all that decode");
        if (!sequence->is_aborted) {
            ends.insert(end_of(*sequence));
        }
    }
    const auto in_order = [](const Phase& one, const Phase& other) {
        return std::pair(one.begins_at, one.number) < std::pair(other.begins_at, other.number);
    };
    require(std::ranges::is_sorted(phases_, in_order), "phases: sorted");
    require(phases_.size() + prefilling.size() + onboarding_.size() == running_.size(),
            "running: each decodes, is prefilled or onboarded");
    require(std::ranges::equal(prefilling, prefilling_), "prefilling: those that run and do not decode");
    require(std::ranges::is_sorted(running_, {}, &JumpSequence::number), "running: oldest first");
    require(ends == ends_, "ends: of all that decode and were not aborted");
    require(context == context_, "context: summed up");
}

}  // namespace penstock
