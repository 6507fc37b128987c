#include "json_text.hpp"

#include <algorithm>
#include <array>
#include <cstdint>

namespace penstock {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
constexpr char kHex[] = "0123456789abcdef";

struct Sequence {
    std::size_t length;  // of the character, or of the fault
    enum class Kind { kWhole, kUnfinished, kFault } kind;
};

// The bytes that may follow a lead byte are 80 to BF, but the second one has narrower bounds after four of them.
bool fits_second(std::uint8_t lead, std::uint8_t second) {
    switch (lead) {
        case 0xE0: return second >= 0xA0 && second <= 0xBF;
        case 0xED: return second >= 0x80 && second <= 0x9F;
        case 0xF0: return second >= 0x90 && second <= 0xBF;
        case 0xF4: return second >= 0x80 && second <= 0x8F;
        default: return second >= 0x80 && second <= 0xBF;
    }
}

// Look at the sequence that begins with a byte above 7F.
Sequence sequence_at(std::string_view content) {
    using enum Sequence::Kind;
    const auto byte = [&](std::size_t at) { return static_cast<std::uint8_t>(content[at]); };
    const std::uint8_t lead = byte(0);
    const std::size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (length == 0) {
        return {1, kFault};
    }
    for (std::size_t at = 1; at < length; ++at) {
        if (at == content.size()) {
            return {at, kUnfinished};
        }
        if (at == 1 ? !fits_second(lead, byte(1)) : (byte(at) & 0xC0) != 0x80) {
            return {at, kFault};
        }
    }
    return {length, kWhole};
}

// Python waits for the third byte of a surrogate, though it is at fault whatever that is.
bool is_half_surrogate(std::string_view rest) {
    return rest.size() == 2 && rest[0] == '\xED' && static_cast<std::uint8_t>(rest[1]) >= 0xA0 &&
           static_cast<std::uint8_t>(rest[1]) <= 0xBF;
}

bool is_plain(char character) {
    const auto byte = static_cast<std::uint8_t>(character);
    return byte >= 0x20 && byte < 0x80 && character != '"' && character != '\\';
}

struct LineEnd {
    std::string_view bytes;
    std::string_view escape;
};

constexpr std::array<LineEnd, 3> kLineEnds{
    {{"\xC2\x85", "\\u0085"}, {"\xE2\x80\xA8", "\\u2028"}, {"\xE2\x80\xA9", "\\u2029"}}};

// A line end beyond ASCII with which text begins; null if there is none.
const LineEnd* line_end_at(std::string_view text) {
    if (text.front() != '\xC2' && text.front() != '\xE2') {
        return nullptr;
    }
    const auto* const found =
        std::ranges::find_if(kLineEnds, [&](const LineEnd& each) { return text.starts_with(each.bytes); });
    return found == kLineEnds.end() ? nullptr : found;
}

}  // namespace

std::size_t append_utf8(std::string_view content, bool is_final, std::string& text) {
    std::size_t at = 0;
    while (at < content.size()) {
        if (static_cast<std::uint8_t>(content[at]) < 0x80) {
            text.push_back(content[at++]);
            continue;
        }
        const Sequence found = sequence_at(content.substr(at));
        if (!is_final && (found.kind == Sequence::Kind::kUnfinished || is_half_surrogate(content.substr(at)))) {
            break;
        }
        text += found.kind == Sequence::Kind::kWhole ? content.substr(at, found.length) : kReplacement;
        at += found.length;
    }
    return at;
}

void append_json(std::string_view text, std::string& json) {
    for (std::size_t at = 0; at < text.size(); ++at) {
        const char character = text[at];
        if (const LineEnd* const end = line_end_at(text.substr(at)); end != nullptr) {
            json += end->escape;
            at += end->bytes.size() - 1;
            continue;
        }
        if (is_plain(character) || static_cast<std::uint8_t>(character) >= 0x80) {
            json.push_back(character);
            continue;
        }
        json.push_back('\\');
        switch (character) {
            case '"':
            case '\\': json.push_back(character); break;
            case '\b': json.push_back('b'); break;
            case '\f': json.push_back('f'); break;
            case '\n': json.push_back('n'); break;
            case '\r': json.push_back('r'); break;
            case '\t': json.push_back('t'); break;
            default:
                json += "u00";
                json.push_back(kHex[character >> 4]);
                json.push_back(kHex[character & 0xF]);
        }
    }
}

bool is_plain_json(std::string_view text) { return std::ranges::all_of(text, is_plain); }

}  // namespace penstock
