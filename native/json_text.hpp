// Bytes as text: UTF-8 with its faults replaced, and text as a JSON string.
//
// The oracles are Python's `codecs.utf_8_decode(..., "replace", ...)` and `penstock.core.json_text.encode_json`: equal bytes give
// equal text.

#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace penstock {

// Append the text of `content` to `text`, each fault as U+FFFD. Returns the bytes used: all if `is_final`, else all but an unfinished
// character at the end.
std::size_t append_utf8(std::string_view content, bool is_final, std::string& text);

// Append valid UTF-8 as it stands between the quotes of a JSON string. U+0085, U+2028 and U+2029 are escaped: some clients end a line
// of an event stream at them.
void append_json(std::string_view text, std::string& json);

// Whether text is ASCII that stands in a JSON string as it is.
bool is_plain_json(std::string_view text);

}  // namespace penstock
