// How a simulated engine that jumps shares a step's tokens among prompts, and takes waiting requests into its batch.

#include "jump_scheduler.hpp"

#include <algorithm>
#include <functional>
#include <numeric>

namespace penstock {

bool JumpScheduler::may_admit() const {
    return !waiting_.empty() && !head_blocked_ && batch_.num_running() < limits_.max_running;
}

Count JumpScheduler::blocks_reserved(Count steps) const {
    Count reserved = batch_.num_running() + batch_.blocks_due(batch_.tick() + 2 - steps, steps);
    for (const auto* list : {&batch_.prefilling(), &batch_.onboarding()}) {
        for (const JumpSequence* sequence : *list) {
            reserved += std::max<Count>(sequence->known / size_ + 1 - size_of(sequence->blocks), 0);
        }
    }
    return reserved;
}

// Give each prompt its tokens of this step, oldest first; those that lack only one always get it.
Count JumpScheduler::share_budget(Count budget) {
    budget -= std::ranges::count(batch_.prefilling(), 1, &JumpSequence::lacking);
    for (JumpSequence* sequence : batch_.prefilling()) {
        const Count lacking = sequence->lacking();
        if (lacking == 1) {
            prompts_.push_back({sequence, 1});
        } else if (budget > 0) {
            const Count amount = std::min({budget, limits_.prompt_budget, lacking});
            budget -= amount;
            prompts_.push_back({sequence, amount});
        }
    }
    return budget;
}

// Share as `share_budget` does, with prompts that wait and those under way in one order; some may be admitted.
Count JumpScheduler::share_by_rank(Count budget, std::vector<Share>& admitted) {
    struct Ranked {
        double rank;
        std::size_t index; // among those that are prefilled now
    };
    std::vector<Ranked> ranked;
    for (JumpSequence* sequence : batch_.prefilling()) {
        const bool is_single = sequence->lacking() == 1;
        if (is_single) {
            --budget;
        } else {
            ranked.push_back({waiting_.rank_of(*sequence, sequence->lacking()), prompts_.size()});
        }
        prompts_.push_back({sequence, is_single ? 1 : 0});
    }
    std::ranges::stable_sort(ranked, {}, &Ranked::rank);
    const Count prompt_budget = step_limits().second;
    for (const auto& [rank, index] : ranked) {
        budget = admit(budget, admitted, rank);
        Share& share = prompts_[index];
        share.amount = std::min({budget, prompt_budget, share.sequence->lacking()});
        budget -= share.amount;
        waiting_.note(*share.sequence, share.sequence->lacking() - share.amount);
    }
    std::erase_if(prompts_, [](const Share& share) { return share.amount == 0; });
    return budget;
}

// Take waiting sequences in, in turn, while there is room; gives what is left of the budget. With `before`, those of a
// rank below it alone, and what runs has not got its blocks of this step yet.
Count JumpScheduler::admit(Count budget, std::vector<Share>& admitted, std::optional<double> before) {
    if (budget <= 0 || !may_admit()) {
        return budget;
    }
    waiting_.rank_new([this](JumpSequence& sequence) { return lacking(sequence); });
    Count reserved = blocks_reserved(before ? 2 : 1);
    const Count prompt_budget = step_limits().second;
    while (!waiting_.empty() && budget > 0 && batch_.num_running() < limits_.max_running) {
        JumpSequence& sequence = waiting_.first();
        if (before && sequence.rank && *sequence.rank >= *before) {
            break;
        }
        const Count blocks = sequence.known / size_ + 1;
        Cached cached = match(sequence);
        const bool is_loaded = cached.num_lower > 0;
        const auto idle = pool_.count_idle(cached.hits);
        const Count windows = windows_of(sequence, size_of(cached.hits) + cached.num_lower);
        if (blocks + windows - size_of(cached.hits) - cached.num_targets + reserved > static_cast<Count>(pool_.num_available() - idle)) {
            if (give_way(&sequence)) {
                continue;
            }
            head_blocked_ = true;
            break;
        }
        take_in(sequence, std::move(cached), windows);
        if (!is_loaded) {
            const Count amount = std::min({budget, prompt_budget, sequence.lacking()});
            extend({{&sequence, blocks_of(sequence.computed + amount) - size_of(sequence.blocks)}});
            batch_.admit(sequence);
            budget -= amount;
            waiting_.note(sequence, sequence.lacking() - amount);
            admitted.push_back({&sequence, amount});
        }
        reserved += 1 + blocks - size_of(sequence.blocks);
    }
    return budget;
}

// Count the blocks of a request's windows, whose steps have so many of its tokens at most.
Count JumpScheduler::window_blocks(Count tokens, Count step_tokens) const {
    Count in_layers = 0;
    for (const auto& [window, layers] : limits_.windows) {
        in_layers += layers * std::min(blocks_of(tokens), blocks_of(window - 1) + blocks_of(step_tokens - 1) + 1);
    }
    return (in_layers + limits_.whole_layers - 1) / limits_.whole_layers;
}

// Count the blocks of a waiting sequence's windows, for its prompt's chunks and its whole answer.
Count JumpScheduler::windows_of(const JumpSequence& sequence, Count num_cached) const {
    if (limits_.windows.empty()) {
        return 0;
    }
    const Count step_tokens = std::min(sequence.known - num_cached * size_, limits_.prompt_budget);
    return std::max(window_blocks(sequence.known, step_tokens), window_blocks(sequence.end_tokens, 1));
}

// Free what the windows of a prompt needed for its chunks and its answer does not need.
void JumpScheduler::end_chunks(JumpSequence& sequence) {
    if (sequence.windows.empty()) {
        return;
    }
    const Count keep = window_blocks(sequence.end_tokens, 1);
    if (keep < size_of(sequence.windows)) {
        pool_.release(std::span(sequence.windows).subspan(at(keep)));
        sequence.windows.resize(at(keep));
        look_again();
    }
}

// Count the tokens that a waiting sequence would have to compute now.
Count JumpScheduler::lacking(JumpSequence& sequence) const {
    const Cached cached = match(sequence);
    return sequence.known - (size_of(cached.hits) + cached.num_lower) * size_;
}

// Find what is cached of a waiting sequence. The last token is computed, whatever is cached.
JumpScheduler::Cached JumpScheduler::match(JumpSequence& sequence, const Ahead& ahead) const {
    if (!sequence.targets.empty()) {
        return {sequence.held, size_of(sequence.targets), size_of(sequence.targets)};
    }
    const Count full = (sequence.known - 1) / size_;
    sequence.name(full);
    const auto hashes = std::span(sequence.hashes).first(at(full));
    Cached cached{pool_.match(hashes)};
    if (tiers_ != nullptr && size_of(cached.hits) < full && !sequence.is_short) {
        cached.num_lower = tiers_->find(hashes, cached.hits, sequence.known, ahead);
    }
    return cached;
}

// Give a waiting sequence the blocks that are cached of it, and count them. Those in lower tiers are loaded; until then
// the sequence only holds blocks.
void JumpScheduler::take_in(JumpSequence& sequence, Cached cached, Count windows) {
    waiting_.remove(sequence);
    pool_.acquire(cached.hits);
    const auto held_targets = pass_on(sequence);
    if (windows > 0) {
        auto taken = pool_.allocate(at(windows));
        require(taken.has_value(), "blocks: fewer are there than were counted");
        sequence.windows = std::move(*taken);
    }
    sequence.blocks = std::move(cached.hits);
    sequence.published = size_of(sequence.blocks);
    sequence.parent.reset();
    if (sequence.published > 0) {
        sequence.parent = sequence.hashes[at(sequence.published - 1)].low;
    }
    sequence.computed = sequence.published * size_;
    const Count cached_tokens = sequence.computed + cached.num_lower * size_;
    prefix_hit_tokens_ += cached_tokens;
    std::optional<Count> uncounted;
    if (!sequence.cached_tokens) {
        sequence.cached_tokens = std::min(cached_tokens, sequence.num_prompt);
        uncounted = sequence.num_prompt - sequence.computed;
    }
    if (cached.num_lower > 0) {
        const auto targets = held_targets.empty() ? tiers_->load(sequence.number, uncounted) : held_targets;
        sequence.blocks.insert(sequence.blocks.end(), targets.begin(), targets.end());
        batch_.admit_to_onboard(sequence);
    }
}

// Publish blocks that were loaded from lower tiers, and have the rest of their prompts computed.
void JumpScheduler::take_arrived() {
    if (tiers_ == nullptr) {
        return;
    }
    const auto arrivals = tiers_->take_arrived();
    for (const auto& [number, come] : arrivals) {
        JumpSequence& sequence = *sequences_.at(number);
        if (sequence.place) {
            take_held(sequence, come);
        }
    }
    for (const auto& [number, come] : arrivals) {
        JumpSequence& sequence = *sequences_.at(number);
        if (batch_.onboarding().end() == std::ranges::find(batch_.onboarding(), &sequence)) {
            continue;
        }
        std::ranges::copy(come, sequence.blocks.begin() + sequence.published);
        const Count expected = size_of(sequence.blocks) * size_;
        sequence.computed = (sequence.published + size_of(come)) * size_;
        prefix_hit_tokens_ -= expected - sequence.computed;
        if (sequence.cached_tokens) {
            sequence.cached_tokens = std::min(*sequence.cached_tokens, sequence.computed);
        }
        publish(sequence, sequence.computed);
        batch_.end_onboarding(sequence);
    }
}

// Publish what was loaded of a waiting sequence, and release what will not come; it loads nothing more.
void JumpScheduler::take_held(JumpSequence& sequence, const std::vector<BlockId>& come) {
    const auto own = std::span(sequence.targets).first(come.size());
    const auto left = std::span(sequence.targets).subspan(come.size());
    const auto num_shared =
        std::inner_product(come.begin(), come.end(), own.begin(), Count{0}, std::plus<>{}, std::not_equal_to<>{});
    const Count num_gone = num_shared + static_cast<Count>(left.size());
    std::optional<std::uint64_t> parent;
    if (sequence.num_before > 0) {
        parent = sequence.hashes[at(sequence.num_before - 1)].low;
    }
    pool_.commit(come, std::span(sequence.hashes).subspan(at(sequence.num_before), come.size()), parent);
    sequence.held.insert(sequence.held.end(), come.begin(), come.end());
    pool_.release(left);
    sequence.num_taken -= num_gone;
    num_taken_ -= num_gone;
    sequence.is_short = !left.empty();
    sequence.targets.clear();
    may_look_ = true;
}

}  // namespace penstock
