#include "msgpack_reader.hpp"

namespace penstock {
namespace {

constexpr int kDepthMax = 64;

}  // namespace

bool MsgpackReader::take(std::string_view bytes) {
    if (!bytes_.substr(at_).starts_with(bytes)) {
        return false;
    }
    at_ += bytes.size();
    return true;
}

std::optional<std::uint8_t> MsgpackReader::byte() {
    if (at_ >= bytes_.size()) {
        return std::nullopt;
    }
    return static_cast<std::uint8_t>(bytes_[at_++]);
}

std::optional<std::uint64_t> MsgpackReader::number(std::size_t bytes) {
    if (bytes_.size() - at_ < bytes) {
        return std::nullopt;
    }
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes; ++i) {
        value = value << 8 | static_cast<std::uint8_t>(bytes_[at_++]);
    }
    return value;
}

std::optional<std::string_view> MsgpackReader::run(std::uint64_t size) {
    if (bytes_.size() - at_ < size) {
        return std::nullopt;
    }
    const std::string_view found = bytes_.substr(at_, size);
    at_ += size;
    return found;
}

std::optional<std::size_t> MsgpackReader::array() {
    const auto kind = byte();
    if (!kind) {
        return std::nullopt;
    }
    if ((*kind & 0xF0) == 0x90) {
        return *kind & 0x0F;
    }
    return *kind == 0xDC ? number(2) : *kind == 0xDD ? number(4) : std::nullopt;
}

std::optional<std::string_view> MsgpackReader::text() {
    const auto kind = byte();
    if (!kind) {
        return std::nullopt;
    }
    if ((*kind & 0xE0) == 0xA0) {
        return run(*kind & 0x1F);
    }
    if (*kind < 0xD9 || *kind > 0xDB) {
        return std::nullopt;
    }
    const auto size = number(std::size_t{1} << (*kind - 0xD9));
    return size ? run(*size) : std::nullopt;
}

std::optional<std::string_view> MsgpackReader::shortest_text() {
    const std::size_t start = at_;
    const auto found = text();
    if (!found) {
        return std::nullopt;
    }
    const std::size_t size = found->size();
    const std::size_t head = size < 32 ? 1 : size < 0x100 ? 2 : size < 0x10000 ? 3 : 5;
    return at_ - start == head + size ? found : std::nullopt;
}

std::optional<std::string_view> MsgpackReader::shortest_binary() {
    const auto kind = byte();
    if (!kind || *kind < 0xC4 || *kind > 0xC6) {
        return std::nullopt;
    }
    const int width = *kind - 0xC4;
    const auto size = number(std::size_t{1} << width);
    if (!size || width != (*size < 0x100 ? 0 : *size < 0x10000 ? 1 : 2)) {
        return std::nullopt;
    }
    return run(*size);
}

bool MsgpackReader::skip(std::size_t values, int depth) {
    if (depth > kDepthMax) {
        return false;
    }
    for (; values > 0; --values) {
        const auto kind = byte();
        if (!kind) {
            return false;
        }
        const std::uint8_t code = *kind;
        std::optional<std::uint64_t> bytes = 0;  // to pass over
        std::optional<std::uint64_t> inner = 0;  // values within
        if (code < 0x80 || code >= 0xE0 || code == 0xC0 || code == 0xC2 || code == 0xC3) {
            continue;  // a small number, nil or a truth value
        }
        if (code < 0x90) {
            inner = 2 * (code & 0x0F);
        } else if (code < 0xA0) {
            inner = code & 0x0F;
        } else if (code < 0xC0) {
            bytes = code & 0x1F;
        } else if (code >= 0xC4 && code <= 0xC6) {
            bytes = number(std::size_t{1} << (code - 0xC4));
        } else if (code >= 0xC7 && code <= 0xC9) {
            bytes = number(std::size_t{1} << (code - 0xC7));
            bytes = bytes ? std::optional(*bytes + 1) : std::nullopt;  // an extension's type
        } else if (code >= 0xCA && code <= 0xCB) {
            bytes = std::uint64_t{4} << (code - 0xCA);
        } else if (code >= 0xCC && code <= 0xD3) {
            bytes = std::uint64_t{1} << (code - 0xCC) % 4;
        } else if (code >= 0xD4 && code <= 0xD8) {
            bytes = (std::uint64_t{1} << (code - 0xD4)) + 1;
        } else if (code >= 0xD9 && code <= 0xDB) {
            bytes = number(std::size_t{1} << (code - 0xD9));
        } else if (code == 0xDC || code == 0xDD) {
            inner = number(code == 0xDC ? 2 : 4);
        } else if (code == 0xDE || code == 0xDF) {
            inner = number(code == 0xDE ? 2 : 4);
            inner = inner ? std::optional(2 * *inner) : std::nullopt;
        } else {
            return false;  // C1, which is nothing
        }
        if (!bytes || !inner || !run(*bytes) || !skip(*inner, depth + 1)) {
            return false;
        }
    }
    return true;
}

}  // namespace penstock
