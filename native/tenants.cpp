#include "tenants.hpp"

#include <algorithm>
#include <stdexcept>

namespace penstock {

Tenants::Link& Tenants::link(BlockId id) {
    const auto index = static_cast<std::size_t>(id);
    if (index >= links_.size()) {
        links_.resize(index + 1);
    }
    return links_[index];
}

void Tenants::enter_idle(BlockId id) {
    const std::uint64_t tenant = link(id).tenant;
    if (++lists_.find_or_insert(tenant).count == most_ + 1 && tenant != 0) {
        over_.push_back(tenant);
    }
}

void Tenants::leave_idle(BlockId id) {
    const std::uint64_t tenant = link(id).tenant;
    List& list = *lists_.find(tenant);
    if (list.count == most_ + 1 && tenant != 0) {
        over_.erase(std::ranges::find(over_, tenant));
    }
    if (list.count == 1) {
        lists_.erase(tenant);
    } else {
        --list.count;
    }
}

void Tenants::add_leaf(BlockId id) {
    Link& own = link(id);
    List& list = *lists_.find(own.tenant);
    own.before = list.last;
    own.after = kNone;
    (list.last == kNone ? list.first : link(list.last).after) = id;
    list.last = id;
}

void Tenants::remove_leaf(BlockId id) {
    const Link own = link(id);
    List& list = *lists_.find(own.tenant);
    (own.before == kNone ? list.first : link(own.before).after) = own.after;
    (own.after == kNone ? list.last : link(own.after).before) = own.before;
}

std::optional<BlockId> Tenants::first_over() const {
    const List* most = nullptr;
    std::uint64_t tenant = 0;
    for (const std::uint64_t each : over_) {
        const List* list = lists_.find(each);
        if (most == nullptr || list->count > most->count || (list->count == most->count && each < tenant)) {
            most = list;
            tenant = each;
        }
    }
    return most == nullptr || most->first == kNone ? std::nullopt : std::optional(most->first);
}

std::optional<BlockId> Tenants::after(BlockId id) const {
    const BlockId next = links_[static_cast<std::size_t>(id)].after;
    return next == kNone ? std::nullopt : std::optional(next);
}

void Tenants::rotate(BlockId last) {
    Link& own = link(last);
    if (own.after == kNone) {
        return;
    }
    List& list = *lists_.find(own.tenant);
    link(list.first).before = list.last;
    link(list.last).after = list.first;
    list.first = own.after;
    list.last = last;
    link(list.first).before = kNone;
    own.after = kNone;
}

void Tenants::reset() {
    links_.clear();
    lists_ = {};
    over_.clear();
}

void Tenants::check(std::size_t num_idle, std::size_t num_leaves) const {
    std::size_t num_counted = 0;
    std::size_t num_listed = 0;
    std::size_t num_over = 0;
    lists_.for_each([&](std::uint64_t tenant, const List& list) {
        std::size_t count = 0;
        BlockId before = kNone;
        for (BlockId id = list.first; id != kNone; id = links_[static_cast<std::size_t>(id)].after) {
            const Link& own = links_[static_cast<std::size_t>(id)];
            if (own.tenant != tenant || own.before != before || ++count > list.count) {
                throw std::logic_error("a tenant's list is broken");
            }
            before = id;
        }
        if (list.last != before) {
            throw std::logic_error("a tenant's list ends elsewhere");
        }
        const bool is_over = tenant != 0 && list.count > most_;
        if (is_over != (std::ranges::count(over_, tenant) == 1)) {
            throw std::logic_error("a tenant past its share is not known");
        }
        num_listed += count;
        num_counted += list.count;
        num_over += is_over;
    });
    if (num_counted != num_idle || num_listed != num_leaves || num_over != over_.size()) {
        throw std::logic_error("an idle block is no tenant's");
    }
}

}  // namespace penstock
