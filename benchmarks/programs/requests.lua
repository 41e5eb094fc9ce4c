-- Requests of which no two within a few thousand are the same: they differ in their query, in a header and, if
-- they have one, in their body. The first argument says which: GET, POST (a few bytes of JSON), image (64
-- pixels) or item (1 KB). wrk formats them before it starts the clock.
local COUNT = 4999
local requests, at = {}, 0
local bodies = {}

function bodies.POST(number)
   return string.format('{"a": %d}', number)
end

function bodies.image(number)
   local pixels = {}
   for place = 1, 64 do
      pixels[place] = (number * 7919 + place * 104729) % 17
   end
   return '{"pixels": [' .. table.concat(pixels, ", ") .. "]}"
end

function bodies.item(number)
   local tags, amounts = {}, {}
   for place = 1, 20 do
      tags[place] = string.format('"tag-%d-%d"', number, place)
      amounts[place] = string.format('"amount-%d": %d.25', place, number + place)
   end
   return string.format(
      '{"name": "item %d", "description": "%s", "price": %d.5, "tags": [%s], "amounts": {%s}}',
      number, string.rep(string.char(97 + number % 26), 200), number,
      table.concat(tags, ", "), table.concat(amounts, ", "))
end

function init(args)
   local body_of = bodies[args[1]]
   for number = 1, COUNT do
      local headers = { ["X-Client"] = string.format("%08x", number * 65537) }
      local method, body = "GET", nil
      if body_of then
         method, body = "POST", body_of(number)
         headers["Content-Type"] = "application/json"
      end
      requests[number] = wrk.format(method, wrk.path .. "?n=" .. number, headers, body)
   end
end

function request()
   at = at % COUNT + 1
   return requests[at]
end
