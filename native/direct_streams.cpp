#include "direct_streams.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "json_text.hpp"
#include "msgpack_reader.hpp"

namespace penstock {
namespace {

// {"type": "deltas", "deltas": [...]} up to the array.
constexpr std::string_view kHead = "\x82\xA4type\xA6" "deltas\xA6" "deltas";
struct Delta {
    std::string_view id;
    std::string_view tokens;
    std::string_view raw;
    bool is_plain;
};

// Read one delta; nullopt where it does not look like one.
std::optional<Delta> read_delta(MsgpackReader& reader, std::string_view head, std::string_view tail) {
    const std::size_t start = reader.at();
    Delta delta{};
    if (const auto plain = [&]() -> bool {
            if (!reader.take(head)) {
                return false;
            }
            const auto id = reader.shortest_text();
            if (!id) {
                return false;
            }
            const auto tokens = reader.shortest_binary();
            if (!tokens || tokens->empty() || tokens->size() % 4 != 0 || !reader.take(tail)) {
                return false;
            }
            delta.id = *id;
            delta.tokens = *tokens;
            return true;
        }();
        plain) {
        delta.is_plain = true;
    } else {
        reader.go_to(start);
        const auto fields = reader.array();
        if (!fields || *fields == 0) {
            return std::nullopt;
        }
        const auto id = reader.text();
        if (!id || !reader.skip(*fields - 1)) {
            return std::nullopt;
        }
        delta.id = *id;
        delta.is_plain = false;
    }
    delta.raw = reader.between(start, reader.at());
    return delta;
}

void append_array(std::size_t size, std::string& out) {
    const auto byte = [&](std::size_t value) { out.push_back(static_cast<char>(value & 0xFF)); };
    if (size < 16) {
        byte(0x90 | size);
    } else if (size <= 0xFFFF) {
        byte(0xDC);
        byte(size >> 8);
        byte(size);
    } else {
        byte(0xDD);
        byte(size >> 24);
        byte(size >> 16);
        byte(size >> 8);
        byte(size);
    }
}

}  // namespace

// ---- TokenTable

void TokenTable::look_up(std::int32_t id, Token& token) const {
    token.bytes = id < 0 ? std::string() : lookup_(id);
    token.is_plain = is_plain_json(token.bytes);
    token.is_known = true;
}

const TokenTable::Token& TokenTable::operator[](std::int32_t id) {
    const auto page = static_cast<std::size_t>(static_cast<std::uint32_t>(id)) / kPageTokens;
    if (page >= kPagesMax) {
        look_up(id, other_);
        return other_;
    }
    if (page >= pages_.size()) {
        pages_.resize(page + 1);
    }
    if (!pages_[page]) {
        pages_[page] = std::make_unique<Page>();
    }
    Token& token = (*pages_[page])[static_cast<std::size_t>(id) % kPageTokens];
    if (!token.is_known) {
        look_up(id, token);
    }
    return token;
}

// ---- ByteDecoder

void ByteDecoder::gather(std::span<const std::int32_t> ids) {
    for (const std::int32_t id : ids) {
        content_ += (*table_)[id].bytes;
    }
}

void ByteDecoder::decode(bool is_final, std::string& text) { content_.erase(0, append_utf8(content_, is_final, text)); }

void ByteDecoder::feed(std::span<const std::int32_t> ids, std::string& text) {
    gather(ids);
    decode(false, text);
}

void ByteDecoder::finish(std::string& text) { decode(true, text); }

void ByteDecoder::feed_json(std::span<const std::int32_t> ids, std::string& json) {
    if (content_.empty() && ids.size() == 1) {
        const TokenTable::Token& token = (*table_)[ids[0]];
        if (token.is_plain) {
            json += token.bytes;
            return;
        }
    }
    std::string text;
    feed(ids, text);
    append_json(text, json);
}

// ---- DirectStream

DirectStream::DirectStream(std::shared_ptr<ByteDecoder> decoder, std::string before, std::string after, bool is_chunked)
    : decoder_(std::move(decoder)), before_(std::move(before)), after_(std::move(after)), is_chunked_(is_chunked) {}

double DirectStream::write(std::string_view packed, double now_s, std::string& chunk) {
    ids_.resize(packed.size() / sizeof(std::int32_t));
    std::memcpy(ids_.data(), packed.data(), ids_.size() * sizeof(std::int32_t));
    const double gap_s = now_s - last_s;
    last_s = now_s;
    gaps_s += gap_s;
    tokens += ids_.size();
    json_.clear();
    decoder_->feed_json(ids_, json_);
    if (!json_.empty()) {
        sent_s = now_s;
        const std::size_t size = before_.size() + json_.size() + 2 + after_.size();
        if (is_chunked_) {
            std::array<char, 16> digits{};
            const auto end = std::to_chars(digits.begin(), digits.end(), size, 16).ptr;
            chunk.append(digits.begin(), end);
            chunk += "\r\n";
        }
        chunk += before_;
        chunk.push_back('"');
        chunk += json_;
        chunk.push_back('"');
        chunk += after_;
        if (is_chunked_) {
            chunk += "\r\n";
        }
    }
    return gap_s / static_cast<double>(ids_.size());
}

// ---- DirectStreams

OpenStream* DirectStreams::find(std::string_view id) const {
    const auto found = open_.find(id);
    return found == open_.end() ? nullptr : found->second.get();
}

bool DirectStreams::open(std::string id, Entry entry) {
    entry->id = id;
    const auto [place, is_new] = open_.try_emplace(std::move(id), std::move(entry));
    if (is_new) {
        place->second->is_open = true;
    }
    return is_new;
}

DirectStreams::Entry DirectStreams::close(std::string_view id) {
    const auto found = open_.find(id);
    if (found == open_.end()) {
        return nullptr;
    }
    Entry entry = std::move(found->second);
    open_.erase(found);
    std::erase(waiting_, entry.get());
    entry->is_open = false;
    return entry;
}

std::optional<std::string> DirectStreams::feed(std::string_view payload) {
    if (!payload.starts_with(kHead)) {
        return std::nullopt;
    }
    MsgpackReader reader(payload);
    reader.go_to(kHead.size());
    const auto count = reader.array();
    if (!count) {
        return std::nullopt;
    }
    ++frame_;
    taken_.clear();
    rest_.clear();
    for (std::size_t i = 0; i < *count; ++i) {
        const auto delta = read_delta(reader, delta_head_, delta_tail_);
        if (!delta) {
            return std::nullopt;
        }
        OpenStream* stream = find(delta->id);
        if (stream != nullptr && delta->is_plain && stream->kept_in_frame != frame_) {
            taken_.emplace_back(stream, delta->tokens);
        } else {
            rest_.push_back(delta->raw);
            if (stream != nullptr) {
                stream->kept_in_frame = frame_; // what follows must not overtake it
            }
        }
    }
    if (taken_.empty() || reader.at() != payload.size()) {
        return std::nullopt;
    }
    for (const auto& [stream, tokens] : taken_) {
        if (stream->waiting.empty()) {
            waiting_.push_back(stream);
        }
        stream->waiting += tokens;
    }
    std::string frame;
    if (!rest_.empty()) {
        frame = kHead;
        append_array(rest_.size(), frame);
        std::ranges::for_each(rest_, [&](std::string_view raw) { frame += raw; });
    }
    return frame;
}

std::vector<DirectStreams::Entry> DirectStreams::take_waiting() {
    std::vector<Entry> entries;
    entries.reserve(waiting_.size());
    for (const OpenStream* stream : waiting_) {
        entries.push_back(open_.find(stream->id)->second);
    }
    waiting_.clear();
    return entries;
}

}  // namespace penstock
