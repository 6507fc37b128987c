#include "jump_scheduler.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

namespace penstock {
namespace {

void require(bool condition, const char* otherwise) {
    if (!condition) {
        throw Broken(otherwise);
    }
}

std::size_t at(Count index) { return static_cast<std::size_t>(index); }

template <class T>
Count size_of(const std::vector<T>& items) {
    return static_cast<Count>(items.size());
}

}  // namespace

JumpScheduler::JumpScheduler(Pool& pool, Count block_size, JumpLimits limits)
    : pool_(pool), size_(block_size), limits_(limits) {}

// ---- Requests in and out

void JumpScheduler::submit(Arrival arrival) {
    auto sequence = std::make_unique<Sequence>(
        Sequence{arrival.number, arrival.known, arrival.num_prompt, arrival.end_tokens,
                 arrival.known - arrival.num_prompt, arrival.hand_over, std::move(arrival.hashes), std::move(arrival.names)});
    sequence->place = waiting_.insert(waiting_.end(), sequence.get());
    waiting_tokens_ += sequence->known;
    sequences_[arrival.number] = std::move(sequence);
}

void JumpScheduler::abort(Count number) {
    const auto found = sequences_.find(number);
    if (found == sequences_.end() || found->second->is_aborted) {
        return;
    }
    Sequence& sequence = *found->second;
    head_blocked_ = false;
    if (sequence.place) {
        waiting_.erase(*sequence.place);
        waiting_tokens_ -= sequence.known;
        sequences_.erase(found);
        return;
    }
    sequence.is_aborted = true;
    aborted_.push_back(&sequence);
    if (sequence.joined) {
        ends_.erase({sequence.end_tick(), number});
    }
}

// ---- Plans

std::optional<Jump> JumpScheduler::plan() {
    drop_aborted();
    prompts_.clear();
    const Count budget = share_budget(limits_.max_batch_tokens - size_of(phases_));
    const std::size_t num_running = running_.size();
    grow();
    const bool is_short = running_.size() < num_running;
    if (is_short) {
        std::erase_if(prompts_, [](const Share& prompt) { return prompt.sequence->blocks.empty(); });
    }
    Jump jump{1, size_of(phases_), context_tokens(tick_), false, {}};
    for (const auto& [sequence, amount] : prompts_) {
        if (sequence->lacking() == 1) {
            ++jump.batch;
            jump.context += sequence->known;
        } else {
            jump.chunks.emplace_back(amount, sequence->computed);
        }
    }
    const std::size_t num_shared = prompts_.size();
    if (!is_short && budget > 0 && may_admit()) {
        admit(budget);
    }
    for (std::size_t index = num_shared; index < prompts_.size(); ++index) {
        jump.chunks.emplace_back(prompts_[index].amount, prompts_[index].sequence->computed);
    }
    jump.has_prompts = !prompts_.empty();
    if (!jump.has_prompts && phases_.empty()) {
        return std::nullopt;
    }
    if (!jump.has_prompts && !may_admit()) { // who was preempted just now may be taken in again with the next step
        jump.steps = longest_jump();
    }
    return jump;
}

bool JumpScheduler::may_admit() const {
    return !waiting_.empty() && !head_blocked_ && size_of(running_) < limits_.max_running;
}

Count JumpScheduler::blocks_reserved() const {
    Count reserved = size_of(running_) + blocks_due(tick_ + 1, 1);
    for (const Sequence* sequence : prefilling_) {
        reserved += std::max<Count>(sequence->known / size_ + 1 - size_of(sequence->blocks), 0);
    }
    return reserved;
}

// Give each prompt its tokens of this step, oldest first; those that lack only one always get it.
Count JumpScheduler::share_budget(Count budget) {
    budget -= std::ranges::count(prefilling_, 1, &Sequence::lacking);
    for (Sequence* sequence : prefilling_) {
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

// Give every running sequence the blocks of its next step; the newest are preempted where none are left.
void JumpScheduler::grow() {
    std::vector<Share> lacking;
    for (const auto& [sequence, amount] : prompts_) {
        lacking.push_back({sequence, blocks_of(sequence->computed + amount) - size_of(sequence->blocks)});
    }
    add_beginning(lacking, tick_, 1);
    Count total = 0;
    for (const Share& share : lacking) {
        total += share.amount;
    }
    if (total <= static_cast<Count>(pool_.num_available())) {
        extend(lacking);
        return;
    }
    for (Sequence* sequence : std::vector(running_)) {
        const auto need = std::ranges::find(lacking, sequence, &Share::sequence);
        while (need != lacking.end() && need->amount > 0 && !sequence->blocks.empty()) {
            if (need->amount <= static_cast<Count>(pool_.num_available())) {
                extend({*need});
                break;
            }
            preempt(*running_.back());
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
    const auto taken = pool_.allocate(at(total));
    require(taken.has_value(), "blocks: fewer are there than were counted");
    auto next = taken->begin();
    for (const auto& [sequence, amount] : lacking) {
        sequence->blocks.insert(sequence->blocks.end(), next, next + amount);
        next += amount;
    }
}

// Take waiting sequences in, oldest first, while there is room.
void JumpScheduler::admit(Count budget) {
    Count reserved = blocks_reserved();
    while (!waiting_.empty() && budget > 0 && size_of(running_) < limits_.max_running) {
        Sequence& sequence = *waiting_.front();
        const Count blocks = sequence.known / size_ + 1;
        const Count full = (sequence.known - 1) / size_; // the last token is computed, whatever is cached
        name(sequence, full);
        auto hits = pool_.match(std::span(sequence.hashes).first(at(full)));
        const Count num_hits = size_of(hits);
        const auto room = static_cast<Count>(pool_.num_available() - pool_.count_idle(hits));
        if (blocks - num_hits + reserved > room) {
            head_blocked_ = true;
            break;
        }
        take_in(sequence, std::move(hits));
        const Count amount = std::min({budget, limits_.prompt_budget, sequence.lacking()});
        extend({{&sequence, blocks_of(sequence.computed + amount) - num_hits}});
        for (auto* list : {&running_, &prefilling_}) {
            list->insert(std::ranges::upper_bound(*list, sequence.number, {}, &Sequence::number), &sequence);
        }
        budget -= amount;
        prompts_.push_back({&sequence, amount});
        reserved += 1 + blocks - size_of(sequence.blocks);
    }
}

// Give the first that waits the blocks that are cached of it, and count them.
void JumpScheduler::take_in(Sequence& sequence, std::vector<BlockId> hits) {
    waiting_.pop_front();
    sequence.place.reset();
    waiting_tokens_ -= sequence.known;
    pool_.acquire(hits);
    sequence.blocks = std::move(hits);
    sequence.published = size_of(sequence.blocks);
    sequence.parent.reset();
    if (sequence.published > 0) {
        sequence.parent = sequence.hashes[at(sequence.published - 1)].low;
    }
    sequence.computed = sequence.published * size_;
    prefix_hit_tokens_ += sequence.computed;
    if (!sequence.cached_tokens) {
        sequence.cached_tokens = std::min(sequence.computed, sequence.num_prompt);
    }
}

// Count the steps until a request ends, or blocks run out; those of the first step are there already.
Count JumpScheduler::longest_jump() const {
    const auto available = static_cast<Count>(pool_.num_available());
    const Count steps = ends_.begin()->first - tick_;
    if (blocks_due(tick_ + 1, steps - 1) <= available) {
        return steps;
    }
    Count low = 1; // so many are possible
    Count high = steps; // and so many are not
    while (high - low > 1) {
        const Count middle = std::midpoint(low, high);
        (blocks_due(tick_ + 1, middle - 1) <= available ? low : high) = middle;
    }
    return low;
}

// Put a running sequence back to the front of the queue.
void JumpScheduler::preempt(Sequence& sequence) {
    leave(sequence);
    sequence.place = waiting_.insert(waiting_.begin(), &sequence);
    waiting_tokens_ += sequence.known;
    ++preemptions_;
}

// ---- Commits

Committed JumpScheduler::commit(Count steps) {
    Committed committed{};
    if (steps > 1) { // the first one's blocks are there
        std::vector<Share> lacking;
        add_beginning(lacking, tick_ + 1, steps - 1);
        extend(lacking);
    }
    steps_ += steps;
    generated_tokens_ += steps * size_of(phases_);
    tick_ += steps;
    for (const auto& [sequence, amount] : prompts_) {
        take_prompt(*sequence, amount);
        if (sequence->hand_over && !sequence->joined && !sequence->is_aborted) {
            committed.prefilling.push_back(sequence->number);
        }
    }
    while (!ends_.empty() && ends_.begin()->first <= tick_) {
        const auto found = sequences_.find(ends_.begin()->second);
        Sequence& sequence = *found->second;
        leave(sequence);
        untold_.push_back(tell(sequence, sequence.known, true));
        sequences_.erase(found);
    }
    committed.has_news = !untold_.empty() || !aborted_.empty() || !prompts_.empty();
    prompts_.clear();
    drop_aborted();
    committed.told = std::exchange(untold_, {});
    return committed;
}

void JumpScheduler::settle(Count steps) {
    std::vector<Share> lacking;
    add_beginning(lacking, tick_ + 1, steps);
    extend(lacking);
    steps_ += steps;
    generated_tokens_ += steps * size_of(phases_);
    tick_ += steps;
}

std::vector<Told> JumpScheduler::so_far() {
    for (Sequence* sequence : running_) {
        if (sequence->joined && !sequence->is_aborted) {
            untold_.push_back(tell(*sequence, sequence->known + tick_ - *sequence->joined, false));
        }
    }
    return std::exchange(untold_, {});
}

void JumpScheduler::take_prompt(Sequence& sequence, Count amount) {
    sequence.computed += amount;
    prefilled_tokens_ += amount;
    publish(sequence, sequence.computed);
    if (sequence.lacking() > 0 || sequence.is_aborted) {
        return;
    }
    join(sequence);
    ++generated_tokens_;
    if (sequence.known < sequence.end_tokens) {
        untold_.push_back(tell(sequence, sequence.known, false));
    }
}

// Put the blocks that are complete into the prefix cache.
void JumpScheduler::publish(Sequence& sequence, Count computed) {
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
        name(sequence, end);
        hashes = std::span(sequence.hashes).subspan(at(start), at(end - start));
    }
    pool_.commit(std::span(sequence.blocks).subspan(at(start), at(end - start)), hashes, sequence.parent);
    sequence.published = end;
    sequence.parent = hashes.back().low;
}

// Have the names of the first blocks.
void JumpScheduler::name(Sequence& sequence, Count count) const {
    const Count have = size_of(sequence.hashes);
    if (count > have) {
        const auto more = sequence.names->between(have, count);
        sequence.hashes.insert(sequence.hashes.end(), more.begin(), more.end());
    }
}

// Take a sequence out of the batch, and give its blocks back.
void JumpScheduler::leave(Sequence& sequence) {
    leave_batch(sequence);
    publish(sequence, sequence.computed);
    pool_.release(sequence.blocks);
    sequence.blocks.clear();
    sequence.published = sequence.computed = 0;
    sequence.parent.reset();
    head_blocked_ = false;
}

void JumpScheduler::drop_aborted() {
    for (Sequence* sequence : aborted_) {
        leave(*sequence);
        sequences_.erase(sequence->number);
    }
    aborted_.clear();
}

// Send the output tokens up to `known` that were not sent.
Told JumpScheduler::tell(Sequence& sequence, Count known, bool is_end) {
    const Count begin = std::exchange(sequence.told, known - sequence.num_prompt);
    const bool is_first = std::exchange(sequence.is_fresh, false);
    return {sequence.number, begin, sequence.told, is_end, is_first ? sequence.cached_tokens : std::nullopt};
}

// ---- Who decodes

// Have a sequence decode from now on: its prompt has given the first token.
void JumpScheduler::join(Sequence& sequence) {
    std::erase(prefilling_, &sequence);
    ++sequence.known;
    sequence.joined = tick_;
    context_ += sequence.known - tick_;
    phases_.insert(phase_of(sequence), {begins_at(sequence), sequence.number, &sequence});
    ends_.emplace(sequence.end_tick(), sequence.number);
}

// `known` is what it has now, and `computed` one less where it decoded.
void JumpScheduler::leave_batch(Sequence& sequence) {
    std::erase(running_, &sequence);
    if (!sequence.joined) {
        std::erase(prefilling_, &sequence);
        return;
    }
    phases_.erase(phase_of(sequence));
    ends_.erase({sequence.end_tick(), sequence.number});
    context_ -= sequence.known - *sequence.joined;
    sequence.known += tick_ - *sequence.joined;
    sequence.computed = sequence.known - 1;
    sequence.joined.reset();
}

Count JumpScheduler::begins_at(const Sequence& sequence) const {
    const Count phase = (1 - sequence.known + *sequence.joined) % size_;
    return phase < 0 ? phase + size_ : phase;
}

// Where it is among the phases, or belongs.
std::vector<JumpScheduler::Phase>::const_iterator JumpScheduler::phase_of(const Sequence& sequence) const {
    return std::ranges::lower_bound(phases_, std::pair(begins_at(sequence), sequence.number), {},
                                    [](const Phase& phase) { return std::pair(phase.begins_at, phase.number); });
}

// Who begins a block within less than a block of ticks, as spans of the phases.
std::vector<JumpScheduler::Span> JumpScheduler::spans(Count first_tick, Count length) const {
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

// Count the blocks that those who decode need for so many steps.
Count JumpScheduler::blocks_due(Count first_tick, Count steps) const {
    Count blocks = steps / size_ * size_of(phases_);
    for (const auto& [begin, end] : spans(first_tick, steps % size_)) {
        blocks += static_cast<Count>(end - begin);
    }
    return blocks;
}

// Add those that need more blocks for so many steps, and how many.
void JumpScheduler::add_beginning(std::vector<Share>& lacking, Count first_tick, Count steps) const {
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

// ---- What it says of itself

JumpLoad JumpScheduler::load(Count steps) const {
    Count queued = waiting_tokens_;
    Count context = context_tokens(tick_ + steps);
    for (const Sequence* sequence : prefilling_) {
        queued += sequence->lacking();
        context += sequence->computed;
    }
    return {
        .running = size_of(running_),
        .waiting = num_waiting(),
        .active_blocks = static_cast<Count>(pool_.num_active()) + blocks_due(tick_ + 1, steps),
        .queued_prefill_tokens = queued,
        .context_tokens = context,
        .steps = steps_ + steps,
        .preemptions = preemptions_,
        .prefilled_tokens = prefilled_tokens_,
        .prefix_hit_tokens = prefix_hit_tokens_,
        .generated_tokens = generated_tokens_ + steps * size_of(phases_),
    };
}

std::vector<std::pair<BlockId, std::int32_t>> JumpScheduler::held() const {
    std::map<BlockId, std::int32_t> counts;
    for (const Sequence* sequence : running_) {
        for (const BlockId id : sequence->blocks) {
            ++counts[id];
        }
    }
    return {counts.begin(), counts.end()};
}

void JumpScheduler::check() const {
    Count context = 0;
    Count waiting_tokens = 0;
    std::vector<const Sequence*> prefilling;
    std::set<std::pair<Count, Count>> ends;
    for (const Sequence* sequence : running_) {
        require(!sequence->place, "running: who runs does not wait");
        if (!sequence->joined) {
            prefilling.push_back(sequence);
            continue;
        }
        context += sequence->known - *sequence->joined;
        const auto phase = phase_of(*sequence);
        require(phase != phases_.end() && phase->sequence == sequence, "phases: of all that decode");
        if (!sequence->is_aborted) {
            ends.emplace(sequence->end_tick(), sequence->number);
        }
    }
    for (const Sequence* sequence : waiting_) {
        require(sequence->blocks.empty() && !sequence->joined, "waiting: who waits holds nothing");
        waiting_tokens += sequence->known;
    }
    const auto in_order = [](const Phase& one, const Phase& other) {
        return std::pair(one.begins_at, one.number) < std::pair(other.begins_at, other.number);
    };
    require(std::ranges::is_sorted(phases_, in_order), "phases: sorted");
    require(phases_.size() + prefilling.size() == running_.size(), "running: each decodes or is prefilled");
    require(std::ranges::equal(prefilling, prefilling_), "prefilling: those that run and do not decode");
    require(std::ranges::is_sorted(running_, {}, &Sequence::number), "running: oldest first");
    require(ends == ends_, "ends: of all that decode and were not aborted");
    require(context == context_, "context: summed up");
    require(waiting_tokens == waiting_tokens_, "waiting tokens: summed up");
    require(waiting_.size() + running_.size() == sequences_.size(), "sequences: each waits or runs");
    require(size_of(running_) <= limits_.max_running, "running: bounded");
}

}  // namespace penstock
