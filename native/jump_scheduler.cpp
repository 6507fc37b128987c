#include "jump_scheduler.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

namespace penstock {
namespace {

std::size_t at(Count index) { return static_cast<std::size_t>(index); }

}  // namespace

JumpScheduler::JumpScheduler(Pool& pool, Count block_size, JumpLimits limits, JumpTiers* tiers)
    : pool_(pool), size_(block_size), limits_(limits), tiers_(tiers), batch_(block_size) {}

void JumpScheduler::reorder(std::optional<double> ageing) {
    waiting_.reorder(ageing);
    head_blocked_ = false;
}

// ---- Requests in and out

void JumpScheduler::submit(Arrival arrival) {
    auto sequence = std::make_unique<JumpSequence>(
        JumpSequence{arrival.number, arrival.known, arrival.num_prompt, arrival.end_tokens,
                     arrival.known - arrival.num_prompt, arrival.hand_over, std::move(arrival.hashes),
                     std::move(arrival.names)});
    sequence->since_tokens = clock_tokens_;
    waiting_.push(*sequence);
    if (waiting_.has_turns()) {
        head_blocked_ = false; // it may be the first now
    }
    sequences_[arrival.number] = std::move(sequence);
}

void JumpScheduler::abort(Count number) {
    const auto found = sequences_.find(number);
    if (found == sequences_.end() || found->second->is_aborted) {
        return;
    }
    JumpSequence& sequence = *found->second;
    head_blocked_ = false;
    if (sequence.place) {
        waiting_.remove(sequence);
        sequences_.erase(found);
        return;
    }
    batch_.abort(sequence);
    aborted_.push_back(&sequence);
}

// ---- Plans

std::optional<Jump> JumpScheduler::plan() {
    drop_aborted();
    take_arrived();
    prompts_.clear();
    std::vector<Share> admitted;
    Count budget = limits_.max_batch_tokens - batch_.num_decoding();
    if (!batch_.prefilling().empty()) {
        budget = waiting_.has_turns() ? share_by_turn(budget, admitted) : share_budget(budget);
    }
    const Count num_running = batch_.num_running();
    grow();
    const bool is_short = batch_.num_running() < num_running;
    if (is_short) {
        std::erase_if(prompts_, [](const Share& prompt) { return prompt.sequence->blocks.empty(); });
    }
    Jump jump{1, batch_.num_decoding(), batch_.context_tokens(batch_.tick()), false, {}};
    for (const auto& [sequence, amount] : prompts_) {
        if (sequence->lacking() == 1) {
            ++jump.batch;
            jump.context += sequence->known;
        } else {
            jump.chunks.emplace_back(amount, sequence->computed);
        }
    }
    num_singles_ = jump.batch - batch_.num_decoding();
    if (!is_short) {
        admit(budget, admitted);
    }
    for (const auto& [sequence, amount] : admitted) {
        jump.chunks.emplace_back(amount, sequence->computed);
    }
    prompts_.insert(prompts_.end(), admitted.begin(), admitted.end());
    jump.has_prompts = !prompts_.empty();
    if (!jump.has_prompts && batch_.num_decoding() == 0) {
        return std::nullopt;
    }
    if (!jump.has_prompts && !may_admit()) { // who was preempted just now may be taken in again with the next step
        jump.steps = longest_jump();
    }
    return jump;
}

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
Count JumpScheduler::share_by_turn(Count budget, std::vector<Share>& admitted) {
    struct Turn {
        double rank;
        std::size_t index; // among those that are prefilled now
    };
    std::vector<Turn> turns;
    for (JumpSequence* sequence : batch_.prefilling()) {
        const bool is_single = sequence->lacking() == 1;
        if (is_single) {
            --budget;
        } else {
            turns.push_back({waiting_.rank_of(*sequence, sequence->lacking()), prompts_.size()});
        }
        prompts_.push_back({sequence, is_single ? 1 : 0});
    }
    std::ranges::stable_sort(turns, {}, &Turn::rank);
    for (const auto& [rank, index] : turns) {
        budget = admit(budget, admitted, rank);
        Share& share = prompts_[index];
        share.amount = std::min({budget, limits_.prompt_budget, share.sequence->lacking()});
        budget -= share.amount;
    }
    std::erase_if(prompts_, [](const Share& share) { return share.amount == 0; });
    return budget;
}

// Give every running sequence the blocks of its next step; the newest are preempted where none are left.
void JumpScheduler::grow() {
    std::vector<Share> lacking;
    for (const auto& [sequence, amount] : prompts_) {
        lacking.push_back({sequence, blocks_of(sequence->computed + amount) - size_of(sequence->blocks)});
    }
    batch_.add_beginning(lacking, batch_.tick(), 1);
    Count total = 0;
    for (const Share& share : lacking) {
        total += share.amount;
    }
    if (total <= static_cast<Count>(pool_.num_available())) {
        extend(lacking);
        return;
    }
    for (JumpSequence* sequence : std::vector(batch_.running())) {
        const auto need = std::ranges::find(lacking, sequence, &Share::sequence);
        while (need != lacking.end() && need->amount > 0 && !sequence->blocks.empty()) {
            if (need->amount <= static_cast<Count>(pool_.num_available())) {
                extend({*need});
                break;
            }
            preempt(*batch_.running().back());
        }
    }
}

// Give sequences so many more blocks each; they are there.
void JumpScheduler::extend(const std::vector<Share>& lacking) {
    Count total = 0;
    for (const Share& share : lacking) {
        total += share.amount;
    }
    if (total == 0) {
        return;
    }
    if (tiers_ != nullptr) {
        tiers_->make_room(total);
    }
    const auto taken = pool_.allocate(at(total));
    require(taken.has_value(), "blocks: fewer are there than were counted");
    auto next = taken->begin();
    for (const auto& [sequence, amount] : lacking) {
        sequence->blocks.insert(sequence->blocks.end(), next, next + amount);
        next += amount;
    }
}

// Take waiting sequences in, in turn, while there is room; gives what is left of the budget. With `before`, those of a
// rank below it alone, and what runs has not got its blocks of this step yet.
Count JumpScheduler::admit(Count budget, std::vector<Share>& admitted, std::optional<double> before) {
    if (budget <= 0 || !may_admit()) {
        return budget;
    }
    waiting_.rank_new([this](JumpSequence& sequence) { return lacking(sequence); });
    Count reserved = blocks_reserved(before ? 2 : 1);
    while (!waiting_.empty() && budget > 0 && batch_.num_running() < limits_.max_running) {
        JumpSequence& sequence = waiting_.first();
        if (before && sequence.rank && *sequence.rank >= *before) {
            break;
        }
        const Count blocks = sequence.known / size_ + 1;
        Cached cached = match(sequence);
        const auto& [hits, beneath] = cached;
        const bool is_fetched = beneath.num_blocks > 0;
        const Count held = size_of(hits) + size_of(beneath.on_device);
        const auto idle = pool_.count_idle(hits) + pool_.count_idle(beneath.on_device);
        if (blocks - held + reserved > static_cast<Count>(pool_.num_available() - idle)) {
            head_blocked_ = true;
            break;
        }
        take_in(sequence, std::move(cached));
        if (!is_fetched) {
            const Count amount = std::min({budget, limits_.prompt_budget, sequence.lacking()});
            extend({{&sequence, blocks_of(sequence.computed + amount) - size_of(sequence.blocks)}});
            batch_.admit(sequence);
            budget -= amount;
            admitted.push_back({&sequence, amount});
        }
        reserved += 1 + blocks - size_of(sequence.blocks);
    }
    return budget;
}

// Count the tokens that a waiting sequence would have to compute now.
Count JumpScheduler::lacking(JumpSequence& sequence) const {
    const Cached cached = match(sequence);
    return sequence.known - (size_of(cached.hits) + cached.beneath.num_blocks) * size_;
}

// Find what is cached of a waiting sequence. The last token is computed, whatever is cached.
JumpScheduler::Cached JumpScheduler::match(JumpSequence& sequence) const {
    const Count full = (sequence.known - 1) / size_;
    sequence.name(full);
    const auto hashes = std::span(sequence.hashes).first(at(full));
    Cached cached{pool_.match(hashes), {}};
    if (tiers_ != nullptr && size_of(cached.hits) < full) {
        cached.beneath = tiers_->find(hashes, cached.hits, sequence.known);
    }
    return cached;
}

// Give a waiting sequence the blocks that are cached of it, and count them. A fetch starts of those in lower tiers; until
// it ends the sequence only holds blocks.
void JumpScheduler::take_in(JumpSequence& sequence, Cached cached) {
    waiting_.remove(sequence);
    pool_.acquire(cached.hits);
    sequence.blocks = std::move(cached.hits);
    sequence.published = size_of(sequence.blocks);
    sequence.parent.reset();
    if (sequence.published > 0) {
        sequence.parent = sequence.hashes[at(sequence.published - 1)].low;
    }
    sequence.computed = sequence.published * size_;
    const Count cached_tokens = sequence.computed + cached.beneath.num_blocks * size_;
    prefix_hit_tokens_ += cached_tokens;
    std::optional<Count> uncounted;
    if (!sequence.cached_tokens) {
        sequence.cached_tokens = std::min(cached_tokens, sequence.num_prompt);
        uncounted = sequence.num_prompt - sequence.computed;
    }
    if (cached.beneath.num_blocks > 0) {
        const auto targets = tiers_->fetch(sequence.number, uncounted);
        sequence.blocks.insert(sequence.blocks.end(), targets.begin(), targets.end());
        batch_.admit_to_onboard(sequence);
    }
}

// Publish blocks that were fetched from lower tiers, and have the rest of their prompts computed.
void JumpScheduler::take_arrived() {
    if (tiers_ == nullptr) {
        return;
    }
    for (const Count number : tiers_->take_arrived()) {
        JumpSequence& sequence = *sequences_.at(number);
        sequence.computed = size_of(sequence.blocks) * size_;
        publish(sequence, sequence.computed);
        batch_.end_onboarding(sequence);
    }
}

// Count the steps until a request ends, or blocks run out; those of the first step are there already.
Count JumpScheduler::longest_jump() const {
    const auto available = static_cast<Count>(pool_.num_available());
    const Count steps = batch_.next_end() - batch_.tick();
    if (batch_.blocks_due(batch_.tick() + 1, steps - 1) <= available) {
        return steps;
    }
    Count low = 1; // so many are possible
    Count high = steps; // and so many are not
    while (high - low > 1) {
        const Count middle = std::midpoint(low, high);
        (batch_.blocks_due(batch_.tick() + 1, middle - 1) <= available ? low : high) = middle;
    }
    return low;
}

// Put a running sequence back to the front of the queue.
void JumpScheduler::preempt(JumpSequence& sequence) {
    leave(sequence);
    waiting_.push_front(sequence);
    ++preemptions_;
}

// ---- Commits

Committed JumpScheduler::commit(Count steps) {
    Committed committed{};
    if (steps > 1) { // the first one's blocks are there
        std::vector<Share> lacking;
        batch_.add_beginning(lacking, batch_.tick() + 1, steps - 1);
        extend(lacking);
    }
    steps_ += steps;
    generated_tokens_ += steps * batch_.num_decoding();
    batch_.advance(steps);
    for (const auto& [sequence, amount] : prompts_) {
        take_prompt(*sequence, amount);
        clock_tokens_ += amount;
        if (sequence->hand_over && !sequence->joined && !sequence->is_aborted) {
            committed.prefilling.push_back(sequence->number);
        }
    }
    clock_tokens_ -= num_singles_;
    while (JumpSequence* sequence = batch_.ended()) {
        leave(*sequence);
        untold_.push_back(tell(*sequence, sequence->known, true));
        sequences_.erase(sequence->number);
    }
    committed.has_news = !untold_.empty() || !aborted_.empty() || !prompts_.empty();
    prompts_.clear();
    drop_aborted();
    committed.told = std::exchange(untold_, {});
    return committed;
}

void JumpScheduler::settle(Count steps) {
    std::vector<Share> lacking;
    batch_.add_beginning(lacking, batch_.tick() + 1, steps);
    extend(lacking);
    steps_ += steps;
    generated_tokens_ += steps * batch_.num_decoding();
    batch_.advance(steps);
}

std::vector<Told> JumpScheduler::so_far() {
    for (JumpSequence* sequence : batch_.running()) {
        if (sequence->joined && !sequence->is_aborted) {
            untold_.push_back(tell(*sequence, sequence->known + batch_.tick() - *sequence->joined, false));
        }
    }
    return std::exchange(untold_, {});
}

void JumpScheduler::take_prompt(JumpSequence& sequence, Count amount) {
    sequence.computed += amount;
    prefilled_tokens_ += amount;
    publish(sequence, sequence.computed);
    if (sequence.lacking() > 0 || sequence.is_aborted) {
        return;
    }
    batch_.join(sequence);
    ++generated_tokens_;
    if (sequence.known < sequence.end_tokens) {
        untold_.push_back(tell(sequence, sequence.known, false));
    }
}

// Put the blocks that are complete into the prefix cache.
void JumpScheduler::publish(JumpSequence& sequence, Count computed) {
    const Count start = sequence.published;
    const Count end = computed / size_;
    if (end <= start) {
        return;
    }
    std::vector<Hash> others; // names past those that came with it are needed once: they are not kept
    std::span<const Hash> hashes;
    if (start >= size_of(sequence.hashes)) {
        others = sequence.names->between(start, end);
        hashes = others;
    } else {
        sequence.name(end);
        hashes = std::span(sequence.hashes).subspan(at(start), at(end - start));
    }
    pool_.commit(std::span(sequence.blocks).subspan(at(start), at(end - start)), hashes, sequence.parent);
    sequence.published = end;
    sequence.parent = hashes.back().low;
}

// Take a sequence out of the batch, and give its blocks back.
void JumpScheduler::leave(JumpSequence& sequence) {
    batch_.leave(sequence);
    if (tiers_ != nullptr) {
        tiers_->cancel(sequence.number);
    }
    publish(sequence, sequence.computed);
    pool_.release(sequence.blocks);
    sequence.blocks.clear();
    sequence.published = sequence.computed = 0;
    sequence.parent.reset();
    head_blocked_ = false;
}

void JumpScheduler::drop_aborted() {
    for (JumpSequence* sequence : aborted_) {
        leave(*sequence);
        sequences_.erase(sequence->number);
    }
    aborted_.clear();
}

// Send the output tokens up to `known` that were not sent.
Told JumpScheduler::tell(JumpSequence& sequence, Count known, bool is_end) {
    const Count begin = std::exchange(sequence.told, known - sequence.num_prompt);
    const bool is_first = std::exchange(sequence.is_fresh, false);
    return {sequence.number, begin, sequence.told, is_end, is_first ? sequence.cached_tokens : std::nullopt};
}

// ---- What it says of itself

JumpLoad JumpScheduler::load(Count steps) const {
    Count queued = waiting_.num_tokens();
    Count context = batch_.context_tokens(batch_.tick() + steps);
    for (const JumpSequence* sequence : batch_.prefilling()) {
        queued += sequence->lacking();
        context += sequence->computed;
    }
    for (const JumpSequence* sequence : batch_.onboarding()) {
        queued += sequence->known - size_of(sequence->blocks) * size_;
        context += sequence->computed;
    }
    return {
        .running = batch_.num_running(),
        .waiting = num_waiting(),
        .active_blocks = static_cast<Count>(pool_.num_active()) + batch_.blocks_due(batch_.tick() + 1, steps),
        .queued_prefill_tokens = queued,
        .context_tokens = context,
        .steps = steps_ + steps,
        .preemptions = preemptions_,
        .prefilled_tokens = prefilled_tokens_,
        .prefix_hit_tokens = prefix_hit_tokens_,
        .generated_tokens = generated_tokens_ + steps * batch_.num_decoding(),
    };
}

std::vector<std::pair<BlockId, std::int32_t>> JumpScheduler::held() const {
    std::map<BlockId, std::int32_t> counts;
    for (const JumpSequence* sequence : batch_.running()) {
        for (const BlockId id : sequence->blocks) {
            ++counts[id];
        }
    }
    return {counts.begin(), counts.end()};
}

void JumpScheduler::check() const {
    batch_.check();
    waiting_.check();
    const auto num_sequences = static_cast<Count>(sequences_.size());
    require(waiting_.size() + batch_.num_running() == num_sequences, "sequences: each waits or runs");
    require(batch_.num_running() <= limits_.max_running, "running: bounded");
}

}  // namespace penstock
